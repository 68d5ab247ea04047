//! Memory of one rank, and what one pass of a unit sees of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gpurun_device::{Backend, DeviceError, ScalarSlot};
use gpurun_model::{BatchShape, Cx, Mode, Model};
use gpurun_plan::{ModelSpec, Op, PassIo, RankPlan, Region, UnitId};
use gpurun_types::{ArenaId, DType, Lane, Place, View};

use super::AdamOptions;
use super::inputs::Staging;
use super::params::{UnitParams, unit_params};
use super::profile::Profile;
use crate::error::EngineError;
use crate::network::Links;

/// Everything that instructions of one rank refer to.
pub struct Machine {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) model: Arc<Model>,
    pub(crate) spec: ModelSpec,
    pub(crate) plan: RankPlan,
    pub(crate) links: Links,
    pub(crate) shape: BatchShape,
    pub(crate) dtype: DType,
    pub(crate) adam: AdamOptions,
    pub(super) loss_factor: AtomicU32,
    pub(super) staging: Staging,
    pub(crate) profile: Profile,
    arenas: [Option<ArenaId>; 2],
    params: Vec<UnitParams>,
}

impl Machine {
    /// Allocates exactly the plan's arenas.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        backend: Arc<dyn Backend>,
        model: Arc<Model>,
        spec: ModelSpec,
        plan: RankPlan,
        links: Links,
        shape: BatchShape,
        dtype: DType,
        adam: AdamOptions,
    ) -> Result<Self, EngineError> {
        let mut arenas = [None, None];
        for (slot, place, bytes) in [(0, Place::Device, plan.device_bytes), (1, Place::Host, plan.host_bytes)] {
            if bytes.0 > 0 {
                arenas[slot] = Some(backend.allocate(place, bytes).map_err(EngineError::DoesNotFit)?);
            }
        }
        let params = unit_params(&model, &spec);
        let loads = plan.train.instrs.iter().filter(|i| matches!(i.op, Op::LoadBatch { .. })).count();
        let staging = Staging::new(backend.as_ref(), loads.max(1), shape.tokens())?;
        let (loss_factor, profile) = (AtomicU32::new(0), Profile::default());
        Ok(Self {
            backend,
            model,
            spec,
            plan,
            links,
            shape,
            dtype,
            adam,
            loss_factor,
            staging,
            profile,
            arenas,
            params,
        })
    }

    /// The memory of a region.
    ///
    /// # Panics
    /// When the region leaves its buffer: a bug of the plan.
    pub fn view(&self, region: Region) -> View {
        let buffer = &self.plan.buffers[region.buffer.0 as usize];
        assert!(region.start + region.len <= buffer.elements, "{region:?} leaves buffer {}", buffer.name);
        let arena = self.arenas[usize::from(buffer.place == Place::Host)].expect("a buffer's arena is allocated");
        View {
            arena,
            offset: buffer.offset + (region.start * buffer.dtype.size()) as u64,
            len: region.len,
            dtype: buffer.dtype,
        }
    }

    /// Start and length of a unit's own parameters in its flat buffer, and whether each decays.
    pub fn own_params(&self, unit: UnitId) -> &[(usize, usize, bool)] {
        &self.params[unit.0 as usize].own
    }

    pub(super) fn views(&self, regions: &[Region]) -> Vec<View> {
        regions.iter().map(|r| self.view(*r)).collect()
    }

    /// Parameter views of a unit from its own and borrowed flat buffers.
    fn param_views(&self, unit: UnitId, flat: &[Region]) -> Vec<View> {
        let Some((own, borrowed)) = flat.split_first() else { return Vec::new() };
        let params = &self.params[unit.0 as usize];
        let own = self.view(*own);
        let mut views: Vec<View> = params.own.iter().map(|&(start, len, _)| own.slice(start, len)).collect();
        for &(which, start, len) in &params.borrowed {
            views.push(self.view(borrowed[which]).slice(start, len));
        }
        views
    }

    pub(super) fn pass(
        &self,
        lane: Lane,
        unit: UnitId,
        io: &PassIo,
        mode: Mode,
        body: impl FnOnce(&Cx<'_>, Pass) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let scratch = self.views(&io.scratch);
        let tokens = self.view(io.batch[0]);
        // Units other than the loss unit do not touch these two; they get an empty view.
        let nothing = tokens.slice(0, 0);
        let cx = Cx {
            backend: self.backend.as_ref(),
            lane,
            shape: self.shape,
            dtype: self.dtype,
            mode,
            tokens,
            targets: self.view(io.batch[1]),
            starts: self.view(io.batch[2]),
            scratch: &scratch,
            loss: io.loss.map_or(View { dtype: DType::F64, ..nothing }, |r| self.view(r)),
            loss_scale: io.scalars.map_or(View { dtype: DType::F32, ..nothing }, |r| {
                self.view(r).slice(ScalarSlot::LossScale as usize, 1)
            }),
            loss_factor: f32::from_bits(self.loss_factor.load(Ordering::Relaxed)),
        };
        let pass = Pass {
            weights: self.param_views(unit, &io.weights),
            grads: self.param_views(unit, &io.grads),
            x: io.x.map(|r| self.view(r)),
            y: io.y.map(|r| self.view(r)),
            dy: io.dy.map(|r| self.view(r)),
            dx: io.dx.map(|r| self.view(r)),
            saved: self.views(&io.saved),
            deferred: self.views(&io.deferred),
        };
        body(&cx, pass)
    }

    /// Where a sampling pass finds its logits: the head of the loss unit's scratch tensor of that name.
    pub(crate) fn logits_view(&self, io: &PassIo) -> Result<View, DeviceError> {
        let spec = self.spec.units.last().expect("a model has units");
        let at = spec.scratch.iter().position(|t| t.name == "logits");
        let at = at.ok_or_else(|| DeviceError::Missing("the loss unit has no scratch tensor named logits".into()))?;
        Ok(self.view(io.scratch[at]).slice(0, self.model.vocabulary))
    }
}

/// Views that one pass of a unit gets.
pub(super) struct Pass {
    pub weights: Vec<View>,
    pub grads: Vec<View>,
    pub x: Option<View>,
    pub y: Option<View>,
    pub dy: Option<View>,
    pub dx: Option<View>,
    pub saved: Vec<View>,
    pub deferred: Vec<View>,
}
