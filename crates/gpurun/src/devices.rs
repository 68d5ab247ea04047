//! What each rank computes on, and what ranks talk through.

use std::sync::Arc;

use gpurun_comm::{Board, CommError, Communicator, Fabric, Nccl, NcclOptions, StagedCommunicator, prepare_nccl};
use gpurun_device::{
    Backend, CpuBackend, CudaBackend, DeviceError, GpuMonitor, Peak, cuda_device_ids, nccl_library, peak,
};
use gpurun_engine::{EngineError, HighWater, HostNetwork, Network};
use gpurun_plan::Machine;
use gpurun_types::{Bytes, DType, Lane, Rank};

use crate::fit::machine;
use crate::host::process_high_water;

use crate::options::{Device, TrainOptions};
use crate::train::{RankPlace, TrainError};

/// A rank's device, and the way to the devices of the other ranks.
pub(crate) struct Devices<'a> {
    /// What this rank computes on.
    pub backend: Arc<dyn Backend>,
    /// The memory of the GPU, where this rank alone uses it and it can be looked at.
    gpu: Option<Arc<Gpu>>,
    transport: Transport<'a>,
}

enum Transport<'a> {
    /// Memory that host and device both address, or no other rank.
    Host(Option<Arc<Fabric>>),
    /// Copies to host memory and back.
    Staged(Arc<Fabric>),
    Nccl(Box<Nccl>, Arc<Fabric>, &'a dyn Board),
}

/// Memory of a GPU that this rank alone uses.
struct Gpu {
    monitor: GpuMonitor,
    /// What was in use before this process took any.
    before: Bytes,
}

impl Gpu {
    /// Looks at a GPU before anything is done with it; `None` where there is no way to look.
    fn watch(id: [u8; 16]) -> Option<Self> {
        let monitor = GpuMonitor::open(id)?;
        let before = monitor.used()?;
        Some(Self { monitor, before })
    }

    /// Device memory that has come into use since.
    fn used(&self) -> Option<Bytes> {
        Some(Bytes(self.monitor.used()?.0.saturating_sub(self.before.0)))
    }
}

/// The GPU of a rank.
struct Choice {
    index: u32,
    id: [u8; 16],
    /// Ranks on this GPU.
    sharers: u32,
}

/// Chooses and opens this rank's device. All ranks decide alike: they tell each other which GPU they would take.
pub(crate) fn open<'a>(
    options: &TrainOptions,
    place: &'a RankPlace<'_>,
    note: &dyn Fn(&str),
) -> Result<Devices<'a>, TrainError> {
    let threads = options.threads.unwrap_or(place.threads);
    let choice = if options.device == Device::Cpu { None } else { choose(options, place, note)? };
    let failed = |source| EngineError::SetUp { what: "starting the device", source };
    let Some(choice) = choice else {
        let cpu = CpuBackend::new(threads).map_err(failed)?;
        if options.device == Device::Auto {
            note(&format!("training on {}", cpu.name()));
        }
        return Ok(Devices::cpu(cpu, Transport::Host(place.fabric.clone())));
    };
    let gpu = Gpu::watch(choice.id).filter(|_| choice.sharers == 1).map(Arc::new);
    let cuda = match (CudaBackend::new(choice.index, threads), options.device) {
        (Ok(cuda), _) => cuda,
        // A driver without the other libraries: said once, so that nobody waits for a GPU that is not used.
        (Err(DeviceError::Missing(reason)), Device::Auto) if place.world == 1 => {
            note(&format!("training on the CPU: {reason}"));
            let cpu = CpuBackend::new(threads).map_err(failed)?;
            return Ok(Devices::cpu(cpu, Transport::Host(None)));
        }
        (Err(error), _) => return Err(TrainError::Device(format!("--device cuda: {error}"))),
    };
    let transport = transport(place, choice.sharers, &cuda, note)?;
    Ok(Devices { backend: Arc::new(cuda), gpu, transport })
}

/// The GPU of this rank; `None` where `--device auto` finds that not every rank can have one.
fn choose(options: &TrainOptions, place: &RankPlace<'_>, note: &dyn Fn(&str)) -> Result<Option<Choice>, TrainError> {
    if place.world > 1 {
        prepare_nccl(options.share_gpu);
    }
    let strict = options.device == Device::Cuda;
    let found = cuda_device_ids();
    let index = found.as_ref().map_or(0, |ids| place.local_rank as usize % ids.len().max(1));
    let mine = found.as_ref().ok().and_then(|ids| ids.get(index)).map_or(&[][..], |id| &id[..]);
    let all = place.exchange("gpu", mine)?;
    match &found {
        Err(error) if strict => return Err(TrainError::Device(format!("--device cuda: {error}"))),
        Err(DeviceError::Missing(_)) => return Ok(None),
        Err(error) => return Err(TrainError::Device(error.to_string())),
        Ok(ids) if ids.is_empty() && strict => {
            let what = "--device cuda: this process sees no GPU; CUDA_VISIBLE_DEVICES may hide it";
            return Err(TrainError::Device(what.to_owned()));
        }
        Ok(_) => {}
    }
    if all.iter().any(Vec::is_empty) {
        return Ok(None);
    }
    let sharers = all.iter().filter(|id| id.as_slice() == mine).count() as u32;
    let most = all.iter().map(|id| all.iter().filter(|other| *other == id).count()).max().unwrap_or(1);
    if most > 1 && !options.share_gpu {
        let gpus = all.len() / most;
        let plural = if gpus == 1 { "GPU" } else { "GPUs" };
        let what = format!("{} ranks would share {gpus} {plural}: use --nproc {gpus}, or --share-gpu", all.len());
        if strict {
            return Err(TrainError::Device(format!("--device cuda: {what}")));
        }
        note(&format!("not on the GPU: {what}"));
        return Ok(None);
    }
    let id = found.expect("this rank has told its GPU")[index];
    Ok(Some(Choice { index: index as u32, id, sharers: sharers.max(1) }))
}

/// Rank 0 says which way the ranks talk, so that all go the same one.
fn transport<'a>(
    place: &'a RankPlace<'_>,
    sharers: u32,
    cuda: &CudaBackend,
    note: &dyn Fn(&str),
) -> Result<Transport<'a>, TrainError> {
    const KEY: &str = "gpurun/transport";
    let (Some(fabric), Some(board)) = (place.fabric.clone(), place.board) else { return Ok(Transport::Host(None)) };
    let loaded = Nccl::load(NcclOptions { timeout: place.timeout, ranks_per_gpu: sharers });
    let first = place.rank == Rank(0);
    if first {
        let word: &[u8] = if matches!(loaded, Ok(Some(_))) { b"nccl" } else { b"host" };
        board.put(KEY, word).map_err(TrainError::Board)?;
    }
    let nccl = loaded.map_err(|reason| TrainError::Device(format!("--device cuda: {reason}")))?;
    let by_nccl = first || board.get(KEY).map_err(TrainError::Board)? == b"nccl";
    let shared = if sharers > 1 { format!(", {sharers} ranks on each (--share-gpu)") } else { String::new() };
    match nccl {
        Some(nccl) if by_nccl => {
            note(&format!("training on {}{shared} through {}", cuda.name(), nccl.name()));
            Ok(Transport::Nccl(Box::new(nccl), fabric, board))
        }
        None if by_nccl && !first => {
            Err(TrainError::Device("NCCL, which rank 0 found, is nowhere to be found here".to_owned()))
        }
        _ => {
            note(&format!(
                "training on {}{shared} through host memory, which is slow: there is no NCCL ({})",
                cuda.name(),
                nccl_library().remedy()
            ));
            Ok(Transport::Staged(fabric))
        }
    }
}

impl<'a> Devices<'a> {
    fn cpu(backend: CpuBackend, transport: Transport<'a>) -> Self {
        Self { backend: Arc::new(backend), gpu: None, transport }
    }

    /// The rates that estimates take for this kind of device.
    pub fn machine(&self, options: &TrainOptions, world: u32) -> Machine {
        machine(Some(if self.on_cpu() { "cpu" } else { "h200" }), options, world)
    }

    /// The highest rate of this rank's device, where its maker states one.
    pub fn peak(&self, dtype: DType) -> Option<Peak> {
        peak(&self.backend.name(), dtype)
    }

    /// What this process holds when it is asked.
    pub fn memory_in_use(&self) -> Box<dyn Fn() -> HighWater + Send + Sync> {
        let (gpu, on_cpu) = (self.gpu.clone(), self.on_cpu());
        Box::new(move || {
            let host = process_high_water();
            HighWater { device: if on_cpu { host } else { gpu.as_deref().and_then(Gpu::used) }, host }
        })
    }

    /// The device's memory is the host's.
    pub fn on_cpu(&self) -> bool {
        !self.backend.is_asynchronous()
    }
}

impl Network for Devices<'_> {
    fn communicator(&self, channel: u32, members: &[Rank], lane: Lane) -> Result<Arc<dyn Communicator>, CommError> {
        let backend = self.backend.clone();
        Ok(match &self.transport {
            Transport::Host(fabric) => {
                return HostNetwork { fabric: fabric.clone(), backend }.communicator(channel, members, lane);
            }
            Transport::Staged(fabric) => {
                let host = fabric.communicator(channel, members, backend.clone())?;
                Arc::new(StagedCommunicator::new(host, lane, backend)?)
            }
            Transport::Nccl(nccl, fabric, board) => {
                Arc::new(nccl.communicator((fabric, *board), channel, members, lane, backend)?)
            }
        })
    }
}
