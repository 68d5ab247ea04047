//! Choosing the next token from logits.

/// Draws tokens: the same seed gives the same text.
pub struct Sampler {
    temperature: f32,
    top_k: Option<usize>,
    state: u64,
}

impl Sampler {
    /// `temperature` 0 takes the likeliest token; `top_k` keeps only the likeliest `k`.
    #[must_use]
    pub const fn new(temperature: f32, top_k: Option<usize>, seed: u64) -> Self {
        Self { temperature, top_k, state: seed }
    }

    /// Uniform in `0..1` (SplitMix64, Steele et al. 2014).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The next token, an index into `logits`. Entries that are not finite are never chosen.
    ///
    /// # Panics
    /// When no entry is finite.
    pub fn next(&mut self, logits: &[f32]) -> usize {
        let mut order: Vec<usize> = (0..logits.len()).filter(|i| logits[*i].is_finite()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        order.truncate(self.top_k.unwrap_or(usize::MAX).max(1));
        let best = *order.first().expect("at least one logit is finite");
        if self.temperature <= 0.0 {
            return best;
        }
        let temperature = self.temperature;
        let weight = |i: usize| f64::from((logits[i] - logits[best]) / temperature).exp();
        let total: f64 = order.iter().map(|i| weight(*i)).sum();
        let mut left = self.uniform() * total;
        for &index in &order {
            left -= weight(index);
            if left < 0.0 {
                return index;
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_takes_the_likeliest() {
        let _limit = testkit::time_limit(10);
        assert_eq!(Sampler::new(0.0, None, 1).next(&[0.0, 3.0, f32::NAN, 2.0]), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let _limit = testkit::time_limit(10);
        let mut sampler = Sampler::new(1.0, Some(2), 7);
        let mut counts = [0; 3];
        for _ in 0..20_000 {
            counts[sampler.next(&[0.0, 2.0f32.ln(), -1.0])] += 1;
        }
        assert_eq!(counts[2], 0, "top_k keeps two");
        let share = f64::from(counts[1]) / 20_000.0;
        assert!((share - 2.0 / 3.0).abs() < 0.02, "{share}");
    }
}
