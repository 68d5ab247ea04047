//! Speed of AdamW on the host beside a memory triad.
//!
//! `host_adam [--params N] [--threads N] [--rounds N]` prints, for each form, the best and the median round.
//! `host_adam --serve ...` runs one round of the form named on each line of standard input and answers `NAME BYTES SECONDS`:
//! so `bench/host_adam.py` takes turns with other implementations.
//!
//! Forms: `triad` (`a = b + 3 c`, 12 bytes an element, with plain stores or past the caches, whichever is faster), `touch`
//! (the memory traffic of `fp32` with no more than an addition: the floor), `fp32`
//! (gradient, weight and both moments in fp32: 28 bytes a parameter), `bf16` (gradient in and weight out in bf16, master and
//! moments in fp32: 28), and both with moments in bf16 (`fp32-m16`: 20, `bf16-m16`: 20).

use std::io::{BufRead, Write};
use std::time::Instant;

use gpurun_device::{AdamRun, AdamW, Backend, CpuBackend, RoundingKey, ScalarSlot};
use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};
use multiversion::multiversion;

/// Parameters are stepped in so many runs, as those of a model are.
const RUNS: usize = 32;
const FORMS: [&str; 6] = ["triad", "touch", "fp32", "bf16", "fp32-m16", "bf16-m16"];

struct Bench {
    backend: CpuBackend,
    threads: usize,
    arena: ArenaId,
    params: usize,
    scalars: View,
}

impl Bench {
    fn new(params: usize, threads: usize) -> Result<Self, String> {
        let params = params.next_multiple_of(64 * RUNS);
        let backend = CpuBackend::new(threads).map_err(|e| e.to_string())?;
        let arena = backend.allocate(Place::Host, Bytes(16 * params as u64 + 256)).map_err(|e| e.to_string())?;
        let scalars = View { arena, offset: 16 * params as u64, len: ScalarSlot::COUNT, dtype: DType::F32 };
        let bench = Self { backend, threads, arena, params, scalars };
        let mut state = [0f32; ScalarSlot::COUNT];
        for (slot, value) in [
            (ScalarSlot::AdamSteps, 3.0),
            (ScalarSlot::GradFactor, 0.9),
            (ScalarSlot::LearningRate, 1e-3),
            (ScalarSlot::BiasCorrection1, 0.27),
            (ScalarSlot::BiasCorrection2Sqrt, 0.38),
        ] {
            state[slot as usize] = value;
        }
        let failed = |e: gpurun_device::DeviceError| e.to_string();
        bench.backend.upload(&state.map(f32::to_le_bytes).concat(), scalars).map_err(failed)?;
        Ok(bench)
    }

    /// Array `index` of four, or half of one.
    fn array(&self, index: f64, dtype: DType) -> View {
        View { arena: self.arena, offset: (index * 4.0 * self.params as f64) as u64, len: self.params, dtype }
    }

    /// Values of usual size in the arrays that a form works on.
    fn prepare(&self, run: &AdamRun) -> Result<(), gpurun_device::DeviceError> {
        let lane = Lane::Host;
        for (view, value) in [(run.master, 0.7), (run.m, 0.01), (run.v, 1e-4), (run.grad, 0.02)] {
            self.backend.fill(lane, view, value)?;
        }
        run.weight.map_or(Ok(()), |weight| self.backend.fill(lane, weight, 0.7))
    }

    fn form(&self, name: &str) -> Option<AdamRun> {
        let (narrow, small) = match name {
            "fp32" => (false, false),
            "bf16" => (true, false),
            "fp32-m16" => (false, true),
            "bf16-m16" => (true, true),
            _ => return None,
        };
        let moment = if small { DType::Bf16 } else { DType::F32 };
        Some(AdamRun {
            master: self.array(0.0, DType::F32),
            m: self.array(1.0, moment),
            v: self.array(2.0, moment),
            grad: self.array(3.0, if narrow { DType::Bf16 } else { DType::F32 }),
            weight: narrow.then(|| self.array(3.5, DType::Bf16)),
            weight_decay: 0.1,
            rounding: RoundingKey::new(1, 0, 0),
        })
    }

    /// Bytes moved, and seconds.
    fn round(&self, name: &str) -> Result<(f64, f64), String> {
        let params = self.params as f64;
        let Some(whole) = self.form(name) else {
            return match name {
                "triad" => Ok((12.0 * params, self.triad()?)),
                "touch" => Ok((28.0 * params, self.touch())),
                _ => Err(format!("there is no form {name:?}; there are {}", FORMS.join(", "))),
            };
        };
        let failed = |e: gpurun_device::DeviceError| e.to_string();
        self.prepare(&whole).map_err(failed)?;
        let len = self.params / RUNS;
        let cut = |i: usize| {
            let part = |view: View| view.slice(i * len, len);
            AdamRun {
                master: part(whole.master),
                m: part(whole.m),
                v: part(whole.v),
                grad: part(whole.grad),
                weight: whole.weight.map(part),
                rounding: whole.rounding.at(i * len),
                ..whole
            }
        };
        let runs: Vec<AdamRun> = (0..RUNS).map(cut).collect();
        let args = AdamW { runs: &runs, scalars: self.scalars, beta1: 0.9, beta2: 0.95, eps: 1e-8 };
        let begin = Instant::now();
        self.backend.adamw(Lane::Host, &args).map_err(failed)?;
        let seconds = begin.elapsed().as_secs_f64();
        let bytes = |view: View| view.bytes() as f64;
        let moved = 2.0 * (bytes(whole.master) + bytes(whole.m) + bytes(whole.v)) + bytes(whole.grad);
        Ok((moved + whole.weight.map_or(0.0, bytes), seconds))
    }

    /// Seconds that `body` takes on as many threads, each with a share of its own of the four arrays: its place and length.
    fn on_shares(&self, body: impl Fn([*mut f32; 4], usize) + Copy + Send) -> f64 {
        let starts = [0.0, 1.0, 2.0, 3.0].map(|i| {
            let array = self.backend.host_pointer(self.array(i, DType::F32));
            array.expect("host memory").cast::<f32>() as usize
        });
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let share = (self.params / self.threads).next_multiple_of(64);
            for first in (0..self.params).step_by(share) {
                let len = share.min(self.params - first);
                scope.spawn(move || body(starts.map(|start| (start + 4 * first) as *mut f32), len));
            }
        });
        begin.elapsed().as_secs_f64()
    }

    /// Seconds of adding one array to the three others.
    fn touch(&self) -> f64 {
        self.on_shares(|[w, m, v, g], len| {
            // SAFETY: four arrays apart, with `len` elements each from there; threads have shares of their own.
            let (w, m, v, g) = unsafe {
                use std::slice::{from_raw_parts, from_raw_parts_mut};
                (
                    from_raw_parts_mut(w, len),
                    from_raw_parts_mut(m, len),
                    from_raw_parts_mut(v, len),
                    from_raw_parts(g, len),
                )
            };
            touch(w, m, v, g);
        })
    }

    /// Seconds of `a = b + 3 c`, the faster of two kinds of stores.
    fn triad(&self) -> Result<f64, String> {
        let [a, b, c] = [3.0, 1.0, 2.0].map(|i| self.array(i, DType::F32));
        let mut best = f64::INFINITY;
        for past_caches in [false, true] {
            let begin = Instant::now();
            self.backend.triad(a, b, c, past_caches).map_err(|e| e.to_string())?;
            best = best.min(begin.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma"))]
fn touch(w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
    for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
        *w += *g;
        *m += *g;
        *v += *g;
    }
}

fn serve(bench: &Bench) -> Result<(), String> {
    println!("ready {}", bench.params);
    for line in std::io::stdin().lock().lines() {
        let name = line.map_err(|e| e.to_string())?;
        let (bytes, seconds) = bench.round(name.trim())?;
        println!("{} {bytes} {seconds}", name.trim());
        std::io::stdout().flush().map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn table(bench: &Bench, rounds: usize) -> Result<(), String> {
    println!("{} parameters, {} threads, {rounds} rounds in turns", bench.params, bench.threads);
    let mut times: Vec<(&str, f64, Vec<f64>)> = FORMS.iter().map(|name| (*name, 0.0, Vec::new())).collect();
    for _ in 0..=rounds {
        for (name, bytes, seconds) in &mut times {
            let (moved, took) = bench.round(name)?;
            *bytes = moved;
            seconds.push(took);
        }
    }
    for (name, bytes, mut seconds) in times {
        // The first round touches memory for the first time.
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        let speed = |s: f64| bytes / s / 1e9;
        let (best, median) = (seconds[0], seconds[seconds.len() / 2]);
        println!(
            "{name:9} best {best:7.3} s {:6.2} GB/s   median {median:7.3} s {:6.2} GB/s",
            speed(best),
            speed(median)
        );
    }
    Ok(())
}

fn run() -> Result<(), String> {
    let (mut params, mut threads, mut rounds, mut serving) = (500_000_000usize, 0usize, 5usize, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        if flag == "--serve" {
            serving = true;
            continue;
        }
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a number"))?;
        let number: usize = value.parse().map_err(|_| format!("{flag} needs a number, not {value:?}"))?;
        match flag.as_str() {
            "--params" => params = number.max(1),
            "--threads" => threads = number,
            "--rounds" => rounds = number.max(1),
            _ => return Err(format!("there is no {flag}; there are --params, --threads, --rounds, --serve")),
        }
    }
    if threads == 0 {
        threads = std::thread::available_parallelism().map_or(1, usize::from);
    }
    let bench = Bench::new(params, threads)?;
    if serving { serve(&bench) } else { table(&bench, rounds) }
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("host_adam: {error}");
            std::process::ExitCode::from(2)
        }
    }
}
