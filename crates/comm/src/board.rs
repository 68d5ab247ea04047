//! How ranks tell each other short things before they have communicators.

/// A board on which one rank writes a value once and all ranks read it.
pub trait Board {
    /// Puts a value under a key.
    ///
    /// # Errors
    /// When the board is gone.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), String>;

    /// The value of a key, as soon as it is there.
    ///
    /// # Errors
    /// When it does not come, or the board is gone.
    fn get(&self, key: &str) -> Result<Vec<u8>, String>;
}
