//! Views side by side as one, and lists of views cut into the lists of parts.

use gpurun_device::DeviceError;
use gpurun_types::View;

/// Elements that a parameter's size must be a multiple of to lie side by side with the next one in its unit's flat buffer.
pub const JOIN_ALIGN: usize = 8;

/// One view over `parts`, which must lie one directly after the other in one arena and share one type: so q, k and v, which
/// are parameters of their own, are one matrix to a matrix product.
///
/// # Errors
/// [`DeviceError::Shape`] when there is no part, or when two neighbours do not touch.
pub fn join(parts: &[View]) -> Result<View, DeviceError> {
    let shape = |detail: String| DeviceError::Shape { operation: "join", detail };
    let Some((&first, rest)) = parts.split_first() else {
        return Err(shape("no views to join".to_owned()));
    };
    let mut whole = first;
    for (i, part) in rest.iter().enumerate() {
        if part.arena != whole.arena || part.dtype != whole.dtype || part.offset != whole.offset + whole.bytes() {
            return Err(shape(format!(
                "view {} ({} elements of {} at byte {}) does not follow view {i}, which ends at byte {}: parameters that are \
                 used as one matrix must be declared one after the other and have sizes that are multiples of {JOIN_ALIGN}",
                i + 1,
                part.len,
                part.dtype,
                part.offset,
                whole.offset + whole.bytes(),
            )));
        }
        whole.len += part.len;
    }
    Ok(whole)
}

/// Hands out the views of a list, part by part.
pub(crate) struct Split<'a>(&'a [View]);

impl<'a> Split<'a> {
    pub(crate) fn new(views: &'a [View]) -> Self {
        Self(views)
    }

    /// The next `count` views.
    pub(crate) fn take(&mut self, count: usize) -> &'a [View] {
        assert!(
            count <= self.0.len(),
            "{count} views wanted, {} left: the list does not fit the declaration",
            self.0.len()
        );
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }
}

#[cfg(test)]
mod tests {
    use gpurun_types::{ArenaId, DType};

    use super::*;

    fn view(offset: u64, len: usize) -> View {
        View { arena: ArenaId(0), offset, len, dtype: DType::F32 }
    }

    #[test]
    fn neighbours_join_and_others_do_not() {
        let _limit = testkit::time_limit(10);
        let whole = join(&[view(64, 8), view(96, 16), view(160, 8)]).unwrap();
        assert_eq!((whole.offset, whole.len), (64, 32));
        assert!(join(&[]).is_err());
        let gap = join(&[view(0, 6), view(32, 8)]).unwrap_err().to_string();
        assert!(gap.contains("view 1") && gap.contains("byte 24") && gap.contains("multiples of 8"), "{gap}");
        assert!(join(&[view(32, 8), view(0, 8)]).is_err(), "order matters");
        let other = View { arena: ArenaId(1), ..view(32, 8) };
        assert!(join(&[view(0, 8), other]).is_err());
        let half = View { dtype: DType::Bf16, ..view(32, 8) };
        assert!(join(&[view(0, 8), half]).is_err());
    }
}
