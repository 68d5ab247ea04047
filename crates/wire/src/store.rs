//! The rendezvous store, without I/O: keys that are set once or often, and readers that wait for them.

use std::collections::BTreeMap;

use crate::message::{ToLauncher, ToWorker, Token};

/// Bytes that keys and values of one job may take together.
const MAX_BYTES: usize = 64 << 20;

/// What the store refuses.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Keys and values would grow beyond the limit.
    #[error("the rendezvous store would exceed {MAX_BYTES} bytes with key {0}")]
    Full(String),
}

/// Keys, values and waiting readers. `C` names a connection.
#[derive(Debug)]
pub struct Store<C> {
    values: BTreeMap<String, Vec<u8>>,
    waiting: Vec<(String, C, u32)>,
    bytes: usize,
}

impl<C> Default for Store<C> {
    fn default() -> Self {
        Self { values: BTreeMap::new(), waiting: Vec::new(), bytes: 0 }
    }
}

impl<C: Clone + PartialEq> Store<C> {
    /// Sets a key, and returns the answers that readers waited for.
    ///
    /// # Errors
    /// When the store is full.
    pub fn set(&mut self, key: String, value: Vec<u8>) -> Result<Vec<(C, ToWorker)>, StoreError> {
        let old = self.values.get(&key).map_or(0, |old| key.len() + old.len());
        let bytes = self.bytes - old + key.len() + value.len();
        if bytes > MAX_BYTES {
            return Err(StoreError::Full(key));
        }
        self.bytes = bytes;
        let (ready, waiting) = std::mem::take(&mut self.waiting).into_iter().partition(|(wanted, ..)| *wanted == key);
        self.waiting = waiting;
        let answers =
            ready.into_iter().map(|(_, reader, id)| (reader, ToWorker::Value { id, value: value.clone() })).collect();
        self.values.insert(key, value);
        Ok(answers)
    }

    /// The answer to a reader, or `None` when it has to wait: the answer then comes from [`Store::set`].
    pub fn get(&mut self, reader: C, key: String, id: u32) -> Option<ToWorker> {
        match self.values.get(&key) {
            Some(value) => Some(ToWorker::Value { id, value: value.clone() }),
            None => {
                self.waiting.push((key, reader, id));
                None
            }
        }
    }

    /// Forgets a reader that is gone.
    pub fn forget(&mut self, reader: &C) {
        self.waiting.retain(|(_, waiting, _)| waiting != reader);
    }
}

/// The verdict on the first message of a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is this rank.
    Rank {
        /// The rank.
        rank: u32,
        /// Its process.
        pid: u32,
    },
    /// It may not join; the reason is for the worker.
    Refused(String),
}

/// Judges the first message of a connection to a job of `world` ranks with the secret `token`.
#[must_use]
pub fn admit(first: &ToLauncher, world: u32, token: &Token) -> Admission {
    let ToLauncher::Hello { rank, world: expected, token: theirs, pid } = first else {
        return Admission::Refused("the first message must be a greeting".to_owned());
    };
    if !token.matches(theirs) {
        return Admission::Refused("wrong token: this store belongs to another job".to_owned());
    }
    if *expected != world {
        return Admission::Refused(format!("the worker expects {expected} ranks, the job has {world}"));
    }
    if *rank >= world {
        return Admission::Refused(format!("rank {rank} is not below the number of ranks, {world}"));
    }
    Admission::Rank { rank: *rank, pid: *pid }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_before_and_after_the_value() {
        let _limit = testkit::time_limit(10);
        let mut store = Store::default();
        assert_eq!(store.get('a', "k".into(), 1), None);
        assert_eq!(store.get('b', "other".into(), 2), None);
        assert_eq!(store.get('c', "k".into(), 3), None);
        store.forget(&'c');
        let answers = store.set("k".into(), vec![9]).unwrap();
        assert_eq!(answers, vec![('a', ToWorker::Value { id: 1, value: vec![9] })]);
        assert_eq!(store.get('d', "k".into(), 4), Some(ToWorker::Value { id: 4, value: vec![9] }));
        assert!(store.set("k".into(), vec![8]).unwrap().is_empty());
        assert_eq!(store.get('d', "k".into(), 5), Some(ToWorker::Value { id: 5, value: vec![8] }));
    }

    #[test]
    fn a_full_store_says_so_and_overwriting_frees() {
        let _limit = testkit::time_limit(10);
        let mut store: Store<u8> = Store::default();
        store.set("k".into(), vec![0; MAX_BYTES - 1]).unwrap();
        assert!(matches!(store.set("l".into(), vec![1]), Err(StoreError::Full(_))));
        store.set("k".into(), vec![]).unwrap();
        store.set("l".into(), vec![1]).unwrap();
    }

    #[test]
    fn strangers_are_refused() {
        let _limit = testkit::time_limit(10);
        let token = Token::new("secret");
        let hello = |rank, world, token: &str| ToLauncher::Hello { rank, world, token: Token::new(token), pid: 5 };
        assert_eq!(admit(&hello(1, 2, "secret"), 2, &token), Admission::Rank { rank: 1, pid: 5 });
        for (stranger, said) in [
            (hello(1, 2, "Secret"), "token"),
            (hello(1, 2, ""), "token"),
            (hello(2, 2, "secret"), "rank 2"),
            (hello(1, 3, "secret"), "3 ranks"),
            (ToLauncher::Finished { summary: String::new() }, "greeting"),
        ] {
            let Admission::Refused(reason) = admit(&stranger, 2, &token) else { panic!("{stranger:?} got in") };
            assert!(reason.contains(said), "{reason}");
        }
        assert_eq!(format!("{token:?}"), "Token(..)");
    }
}
