//! The order of an epoch: a pseudo-random permutation that needs no memory.

/// A permutation of `0..n`, chosen by `(seed, epoch)`: a balanced Feistel network over the next even power of two (Luby &
/// Rackoff 1988), walked until it lands below `n` (cycle walking, Black & Rogaway 2002).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    n: u64,
    half_bits: u32,
    key: u64,
}

const ROUNDS: u64 = 6;

impl Permutation {
    pub(crate) fn new(n: u64, seed: u64, epoch: u64) -> Self {
        let bits = 64 - n.saturating_sub(1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(1);
        Self { n, half_bits, key: mix(seed ^ mix(epoch.wrapping_add(0x5851_f42d_4c95_7f2d))) }
    }

    /// Where `i` goes. `i` must be below `n`.
    pub(crate) fn at(&self, i: u64) -> u64 {
        assert!(i < self.n, "{i} of {}", self.n);
        let mut x = i;
        loop {
            x = self.network(x);
            if x < self.n {
                return x;
            }
        }
    }

    fn network(&self, x: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for round in 0..ROUNDS {
            let f = mix(right ^ self.key.wrapping_add(round.wrapping_mul(0x9e37_79b9_7f4a_7c15))) & mask;
            (left, right) = (right, left ^ f);
        }
        left << self.half_bits | right
    }
}

/// SplitMix64's finaliser (Steele et al. 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Permutation;

    proptest! {
        #[test]
        fn every_index_comes_once(n in 1u64..3000, seed: u64, epoch: u64) {
            let _limit = testkit::time_limit(60);
            let p = Permutation::new(n, seed, epoch);
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let j = p.at(i) as usize;
                prop_assert!(!seen[j]);
                seen[j] = true;
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let _limit = testkit::time_limit(10);
        let order = |seed, epoch| (0..100).map(|i| Permutation::new(100, seed, epoch).at(i)).collect::<Vec<_>>();
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 0), (0..100).collect::<Vec<_>>());
    }
}
