//! How fast matrix products, memory, the way to the device and Adam on the host are here and now.

use std::time::Instant;

use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

use crate::{AdamRun, AdamW, Backend, DeviceError, Matmul, RoundingKey, ScalarSlot};

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

/// What a device reaches, of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceRates {
    /// FLOP/s of a large square matrix product, summed in fp32.
    pub matmul: f64,
    /// Bytes a second of a copy within the device's memory, read and written bytes both counted.
    pub memory: f64,
}

impl DeviceRates {
    /// The lowest of several ranks' rates, each by itself.
    #[must_use]
    pub fn lowest(self, other: Self) -> Self {
        Self { matmul: self.matmul.min(other.matmul), memory: self.memory.min(other.memory) }
    }
}

/// Measures a device with a large product and a copy of more than caches hold; the memory is given back. Ranks that share a
/// processor should measure at the same time: so they share it in training.
///
/// # Errors
/// When there is no memory for it, or the device fails.
pub fn device_rates(backend: &dyn Backend, dtype: DType) -> Result<DeviceRates, DeviceError> {
    // A GPU is busy with a larger product than a few cores are, and takes several without a pause.
    let (side, copied, times) = if backend.is_asynchronous() { (8192, 512 << 20, 5) } else { (1024, 64 << 20, 1) };
    let bytes = (3 * dtype.bytes(side * side).0).max(2 * copied);
    let arena = backend.allocate(Place::Device, Bytes(bytes))?;
    let probe = DeviceProbe { backend, arena, times };
    let rates = probe
        .matmul(side, dtype)
        .and_then(|matmul| Ok(DeviceRates { matmul, memory: probe.copy(copied as usize / 4)? }));
    backend.release(arena)?;
    rates
}

struct DeviceProbe<'a> {
    backend: &'a dyn Backend,
    arena: ArenaId,
    /// Repetitions of a round.
    times: usize,
}

impl DeviceProbe<'_> {
    /// The arena as arrays of `len` elements.
    fn array(&self, index: usize, len: usize, dtype: DType) -> View {
        View { arena: self.arena, offset: dtype.bytes(index * len).0, len, dtype }
    }

    /// The highest rate of work that is worth `each`.
    fn rate(&self, each: f64, work: impl Fn() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        best(each * self.times as f64, |_| {
            (0..self.times).try_for_each(|_| work())?;
            self.backend.synchronize(Lane::Compute)
        })
    }

    fn matmul(&self, side: usize, dtype: DType) -> Result<f64, DeviceError> {
        let [a, b, d] = [0, 1, 2].map(|index| self.array(index, side * side, dtype));
        // Not zero: on zeros a device draws less power, and is faster than it is in training.
        self.backend.fill(Lane::Compute, a, 0.37)?;
        self.backend.fill(Lane::Compute, b, -1.21)?;
        // The form of a layer's forward.
        let (transpose_a, transpose_b) = (false, true);
        let (bias, residual, accumulate) = (None, None, false);
        let product =
            Matmul { a, b, d, m: side, n: side, k: side, transpose_a, transpose_b, bias, residual, accumulate };
        self.rate(2.0 * (side as f64).powi(3), || self.backend.matmul(Lane::Compute, product))
    }

    fn copy(&self, len: usize) -> Result<f64, DeviceError> {
        let [from, to] = [0, 1].map(|index| self.array(index, len, DType::F32));
        self.rate(8.0 * len as f64, || self.backend.copy(Lane::Compute, from, to))
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
