//! How fast host memory, the way to the device and Adam on the host are here and now.

use std::time::Instant;

use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

use crate::{AdamRun, AdamW, Backend, DeviceError, RoundingKey, ScalarSlot};

/// Measured rates of one rank, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostRates {
    /// Copies from host to device, while others go the other way.
    pub to_device: f64,
    /// Copies from device to host, at the same time.
    pub to_host: f64,
    /// Host memory: a triad on the rank's threads, read and written bytes.
    pub triad: f64,
    /// AdamW on the host, read and written bytes: 28 a parameter, in fp32.
    pub adam: f64,
}

impl HostRates {
    /// The lowest of several ranks' rates, each by itself.
    #[must_use]
    pub fn lowest(self, other: Self) -> Self {
        Self {
            to_device: self.to_device.min(other.to_device),
            to_host: self.to_host.min(other.to_host),
            triad: self.triad.min(other.triad),
            adam: self.adam.min(other.adam),
        }
    }
}

/// Times that each is measured; the best counts. The first brings memory in.
const ROUNDS: usize = 4;

/// Measures with about `bytes` of host memory and a quarter as much of the device's, which are given back. Ranks that share a
/// host should measure at the same time: so they share it in training.
///
/// # Errors
/// When there is no memory for it, or the device fails.
pub fn host_rates(backend: &dyn Backend, bytes: Bytes) -> Result<HostRates, DeviceError> {
    let len = (bytes.0 as usize / 16).next_multiple_of(64).max(64);
    let scalars = DType::F32.bytes(ScalarSlot::COUNT);
    let host = backend.allocate(Place::Host, Bytes(16 * len as u64) + scalars)?;
    let device = backend.allocate(Place::Device, Bytes(4 * len as u64));
    let probe = device.and_then(|device| {
        let rates = Probe { backend, host, device, len }.rates();
        rates.and_then(|rates| backend.release(device).map(|()| rates))
    });
    backend.release(host)?;
    probe
}

struct Probe<'a> {
    backend: &'a dyn Backend,
    /// Four arrays, then the scalar state.
    host: ArenaId,
    /// One array.
    device: ArenaId,
    /// Elements of an array.
    len: usize,
}

impl Probe<'_> {
    fn array(&self, index: usize) -> View {
        View { arena: self.host, offset: (4 * self.len * index) as u64, len: self.len, dtype: DType::F32 }
    }

    fn rates(&self) -> Result<HostRates, DeviceError> {
        let [to_device, to_host] = self.link()?;
        Ok(HostRates { to_device, to_host, triad: self.triad()?, adam: self.adam()? })
    }

    /// Both ways at once, half an array each.
    fn link(&self) -> Result<[f64; 2], DeviceError> {
        let half = self.len / 2;
        let device = View { arena: self.device, ..self.array(0) };
        let ways = [
            (Lane::CopyIn, self.array(0).slice(0, half), device.slice(0, half)),
            (Lane::CopyOut, device.slice(half, half), self.array(1).slice(0, half)),
        ];
        let copy = |(lane, src, dst): (Lane, View, View)| -> Result<f64, DeviceError> {
            let begin = Instant::now();
            self.backend.copy(lane, src, dst)?;
            self.backend.synchronize(lane)?;
            Ok(src.bytes() as f64 / begin.elapsed().as_secs_f64())
        };
        let mut best = [0.0f64; 2];
        for _ in 0..ROUNDS {
            let rates = std::thread::scope(|scope| {
                let ways = ways.map(|way| scope.spawn(move || copy(way)));
                ways.map(|way| way.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            });
            for (best, rate) in best.iter_mut().zip(rates) {
                *best = best.max(rate?);
            }
        }
        Ok(best)
    }

    /// The faster of both kinds of stores.
    fn triad(&self) -> Result<f64, DeviceError> {
        let [dst, a, b] = [0, 1, 2].map(|i| self.array(i));
        best(12.0 * self.len as f64, |round| self.backend.triad(dst, a, b, round % 2 == 1))
    }

    fn adam(&self) -> Result<f64, DeviceError> {
        let [master, m, v, grad] = [0, 1, 2, 3].map(|i| self.array(i));
        for (view, value) in [(master, 0.7), (m, 0.01), (v, 1e-4), (grad, 0.02)] {
            self.backend.fill(Lane::Host, view, value)?;
        }
        let scalars = View { offset: 16 * self.len as u64, len: ScalarSlot::COUNT, ..self.array(0) };
        let mut state = [0f32; ScalarSlot::COUNT];
        let first = [
            (ScalarSlot::AdamSteps, 1.0),
            (ScalarSlot::GradFactor, 1.0),
            (ScalarSlot::LearningRate, 1e-3),
            (ScalarSlot::BiasCorrection1, 0.1),
            (ScalarSlot::BiasCorrection2Sqrt, 0.22),
        ];
        first.into_iter().for_each(|(slot, value)| state[slot as usize] = value);
        self.backend.upload(&state.map(f32::to_le_bytes).concat(), scalars)?;
        let rounding = RoundingKey::new(0, 0, 0);
        let runs = [AdamRun { master, m, v, grad, weight: None, weight_decay: 0.1, rounding }];
        let args = AdamW { runs: &runs, scalars, beta1: 0.9, beta2: 0.95, eps: 1e-8 };
        best(28.0 * self.len as f64, |_| self.backend.adamw(Lane::Host, &args))
    }
}

/// The highest rate of some rounds that move `bytes` each.
fn best(bytes: f64, round: impl Fn(usize) -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let mut best = 0.0f64;
    for number in 0..ROUNDS {
        let begin = Instant::now();
        round(number)?;
        best = best.max(bytes / begin.elapsed().as_secs_f64());
    }
    Ok(best)
}
