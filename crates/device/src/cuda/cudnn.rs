//! Attention through cuDNN, where it is installed, for sequences that are one document each.
//!
//! cuDNN takes a graph of operations and recognises attention in it. The graphs here are those that its own front end makes of
//! scaled-dot-product attention with a causal mask (cuDNN developer guide, "Fused Attention").

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::cudnn::sys;
use cudarc::driver::sys as driver_sys;
use gpurun_types::{DType, Lane};
use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendAttributeType_t as Type;
use sys::cudnnBackendDescriptorType_t as Kind;
use sys::cudnnDataType_t as Data;
use sys::cudnnPointwiseMode_t as Mode;

use super::driver::check as check_driver;
use super::{CudaBackend, Result, libraries};
use crate::{Attention, AttentionBackward, AttentionShape, DeviceError};

/// When attention goes through cuDNN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudnnAttention {
    /// Never.
    Off,
    /// Where it gives the same bits every run.
    #[default]
    Deterministic,
    /// Also with algorithms whose sums depend on timing.
    Fastest,
}

fn check(call: &str, code: sys::cudnnStatus_t) -> Result {
    if code == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut detail = [0; 256];
    // SAFETY: the library gives a string of its own for every code, and writes at most that many bytes of detail.
    let (reason, detail) = unsafe {
        sys::cudnnGetLastErrorString(detail.as_mut_ptr(), detail.len() - 1);
        (CStr::from_ptr(sys::cudnnGetErrorString(code)), CStr::from_ptr(detail.as_ptr()))
    };
    let reason = format!("{}: {}", reason.to_string_lossy(), detail.to_string_lossy());
    Err(DeviceError::Failed { operation: call.to_owned(), reason })
}

/// A descriptor of the library's, destroyed when dropped.
struct Descriptor(sys::cudnnBackendDescriptor_t);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and is destroyed once.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

impl Descriptor {
    fn new(kind: Kind) -> Result<Self> {
        let mut descriptor = std::ptr::null_mut();
        // SAFETY: the library writes a handle to a local.
        let code = unsafe { sys::cudnnBackendCreateDescriptor(kind, &raw mut descriptor) };
        check(&format!("cudnnBackendCreateDescriptor({kind:?})"), code)?;
        Ok(Self(descriptor))
    }

    /// Sets an attribute to values whose type is the one that `kind` stands for.
    fn set<V: Copy>(self, name: Name, kind: Type, values: &[V]) -> Result<Self> {
        // SAFETY: the library reads that many values, and copies them.
        let code =
            unsafe { sys::cudnnBackendSetAttribute(self.0, name, kind, values.len() as i64, values.as_ptr().cast()) };
        check(&format!("cudnnBackendSetAttribute({name:?})"), code)?;
        Ok(self)
    }

    fn link(self, name: Name, to: &Self) -> Result<Self> {
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[to.0])
    }

    fn done(self, what: &str) -> Result<Self> {
        // SAFETY: the descriptor exists.
        check(&format!("cudnnBackendFinalize({what})"), unsafe { sys::cudnnBackendFinalize(self.0) })?;
        Ok(self)
    }
}

/// A graph under construction. Descriptors must outlive what refers to them.
#[derive(Default)]
struct Graph {
    tensors: Vec<Descriptor>,
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

/// Index of a tensor, which is its unique id too.
type Tensor = usize;

/// Where the elements of a tensor are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// Nowhere: it passes from one operation to the next.
    Virtual,
    /// In memory that the call names.
    Memory,
    /// One number in host memory that the call names.
    Value,
}

const FLOAT: Data = Data::CUDNN_DATA_FLOAT;

impl Graph {
    fn tensor(&mut self, held: Held, data: Data, dimensions: [usize; 4], strides: [usize; 4]) -> Result<Tensor> {
        let id = self.tensors.len();
        let tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Type::CUDNN_TYPE_INT64, &[id as i64])?
            .set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &[data])?
            .set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Type::CUDNN_TYPE_INT64, &dimensions.map(|d| d as i64))?
            .set(Name::CUDNN_ATTR_TENSOR_STRIDES, Type::CUDNN_TYPE_INT64, &strides.map(|s| s as i64))?
            .set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Type::CUDNN_TYPE_INT64, &[16i64])?
            .set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Type::CUDNN_TYPE_BOOLEAN, &[held == Held::Virtual])?
            .set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, Type::CUDNN_TYPE_BOOLEAN, &[held == Held::Value])?
            .done("tensor")?;
        self.tensors.push(tensor);
        Ok(id)
    }

    /// One number, given by value at the call.
    fn value(&mut self) -> Result<Tensor> {
        self.tensor(Held::Value, FLOAT, [1; 4], [1; 4])
    }

    fn push(&mut self, operation: Descriptor, part: Option<Descriptor>, what: &str) -> Result {
        let operation = operation.done(what)?;
        self.parts.extend(part);
        self.operations.push(operation);
        Ok(())
    }

    fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result {
        let part = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &[FLOAT])?
            .done("matmul")?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &self.tensors[a])?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &self.tensors[b])?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &self.tensors[c])?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &part)?;
        self.push(operation, Some(part), "matmul operation")
    }

    /// `y = mode(x, b, t)`; the axis is that of an index.
    fn pointwise(
        &mut self,
        mode: Mode,
        x: Tensor,
        b: Option<Tensor>,
        t: Option<Tensor>,
        axis: Option<i64>,
        y: Tensor,
    ) -> Result {
        let precision = if mode == Mode::CUDNN_POINTWISE_CMP_GE { Data::CUDNN_DATA_BOOLEAN } else { FLOAT };
        let mut part = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_POINTWISE_MODE, Type::CUDNN_TYPE_POINTWISE_MODE, &[mode])?
            .set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Type::CUDNN_TYPE_DATA_TYPE, &[precision])?;
        if let Some(axis) = axis {
            part = part.set(Name::CUDNN_ATTR_POINTWISE_AXIS, Type::CUDNN_TYPE_INT64, &[axis])?;
        }
        let part = part.done("pointwise")?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &part)?
            .link(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &self.tensors[x])?
            .link(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &self.tensors[y])?;
        if let Some(b) = b {
            operation = operation.link(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &self.tensors[b])?;
        }
        if let Some(t) = t {
            operation = operation.link(Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &self.tensors[t])?;
        }
        self.push(operation, Some(part), &format!("{mode:?} operation"))
    }

    fn one(&mut self, mode: Mode, x: Tensor, y: Tensor) -> Result {
        self.pointwise(mode, x, None, None, None, y)
    }

    fn two(&mut self, mode: Mode, x: Tensor, b: Tensor, y: Tensor) -> Result {
        self.pointwise(mode, x, Some(b), None, None, y)
    }

    fn reduce(&mut self, operator: sys::cudnnReduceTensorOp_t, deterministic: bool, x: Tensor, y: Tensor) -> Result {
        let part = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &[operator])?
            .set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &[FLOAT])?;
        // Absent in versions that know no such choice.
        let part = if deterministic {
            part.set(Name::CUDNN_ATTR_REDUCTION_IS_DETERMINISTIC, Type::CUDNN_TYPE_BOOLEAN, &[true])?
        } else {
            part
        };
        let part = part.done("reduction")?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &self.tensors[x])?
            .link(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &self.tensors[y])?
            .link(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &part)?;
        self.push(operation, Some(part), "reduction operation")
    }

    fn reshape(&mut self, x: Tensor, y: Tensor) -> Result {
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &self.tensors[x])?
            .link(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &self.tensors[y])?;
        self.push(operation, None, "reshape operation")
    }

    /// The first engine configuration of the library's heuristics that makes a plan.
    fn plan(&self, handle: sys::cudnnHandle_t) -> Result<(Descriptor, u64)> {
        let operations: Vec<_> = self.operations.iter().map(|o| o.0).collect();
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle])?
            .set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &operations)?
            .done("operation graph")?;
        let heuristics = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &graph)?
            .set(
                Name::CUDNN_ATTR_ENGINEHEUR_MODE,
                Type::CUDNN_TYPE_HEUR_MODE,
                &[sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A],
            )?
            .done("heuristics")?;
        let configurations =
            (0..8).map(|_| Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)).collect::<Result<Vec<_>>>()?;
        let mut handles: Vec<_> = configurations.iter().map(|c| c.0).collect();
        let mut count = 0;
        // SAFETY: there is room for as many results as are asked for; the library fills descriptors that exist.
        let code = unsafe {
            sys::cudnnBackendGetAttribute(
                heuristics.0,
                Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
                Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                handles.len() as i64,
                &raw mut count,
                handles.as_mut_ptr().cast(),
            )
        };
        check("cudnnBackendGetAttribute(engine configurations)", code)?;
        let mut last = DeviceError::Missing("cuDNN has no engine for this attention".to_owned());
        for configuration in &configurations[..(count.max(0) as usize).min(configurations.len())] {
            let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
                .set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle])?
                .link(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)?
                .done("execution plan");
            match plan {
                Ok(plan) => {
                    let workspace = workspace_of(&plan)?;
                    return Ok((plan, workspace));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn workspace_of(plan: &Descriptor) -> Result<u64> {
    let (mut bytes, mut count) = (0i64, 0i64);
    // SAFETY: the library writes one number to a local.
    let code = unsafe {
        sys::cudnnBackendGetAttribute(
            plan.0,
            Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
            Type::CUDNN_TYPE_INT64,
            1,
            &raw mut count,
            (&raw mut bytes).cast(),
        )
    };
    check("cudnnBackendGetAttribute(workspace)", code)?;
    Ok(bytes.max(0) as u64)
}

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: AttentionShape,
    dtype: DType,
    backward: bool,
    deterministic: bool,
}

/// Tensors of the call, by what they hold.
#[derive(Clone, Copy, Default)]
struct Ids {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    scale: Tensor,
    lowest: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    one: Tensor,
    sums: Tensor,
    dq_sum: Tensor,
}

struct Plan {
    plan: Descriptor,
    ids: Ids,
    workspace: u64,
    // The plan refers to the graph's descriptors.
    _graph: Graph,
}

/// Dimensions and strides of the tensors of one attention.
struct Layout {
    data: Data,
    query: [usize; 4],
    scores: [usize; 4],
    row: [usize; 4],
    packed: [usize; 4],
    flat: [usize; 4],
    scores_strides: [usize; 4],
    turned_strides: [usize; 4],
    row_strides: [usize; 4],
    keys: [usize; 4],
    keys_turned: [usize; 4],
    packed_turned: [usize; 4],
}

impl Layout {
    fn new(shape: AttentionShape, dtype: DType) -> Self {
        let AttentionShape { batch: b, seq: s, heads: h, kv_heads: g, head_dim: d } = shape;
        let w = shape.packed_width();
        Self {
            data: if dtype == DType::F16 { Data::CUDNN_DATA_HALF } else { Data::CUDNN_DATA_BFLOAT16 },
            query: [b, h, s, d],
            scores: [b, h, s, s],
            row: [b, h, s, 1],
            packed: [s * w, d, w, 1],
            flat: [s * h * d, d, h * d, 1],
            scores_strides: [h * s * s, s * s, s, 1],
            turned_strides: [h * s * s, s * s, 1, s],
            row_strides: [h * s, s, 1, 1],
            keys: [b, g, s, d],
            keys_turned: [b, g, d, s],
            packed_turned: [s * w, d, 1, w],
        }
    }
}

/// Causal scores from scaled ones: those of later keys become minus infinity.
fn masked(g: &mut Graph, l: &Layout, scores: Tensor, lowest: Tensor) -> Result<Tensor> {
    let index = Data::CUDNN_DATA_INT32;
    let row = g.tensor(Held::Virtual, index, l.scores, l.scores_strides)?;
    let column = g.tensor(Held::Virtual, index, l.scores, l.scores_strides)?;
    let seen = g.tensor(Held::Virtual, Data::CUDNN_DATA_BOOLEAN, l.scores, l.scores_strides)?;
    let masked = g.tensor(Held::Virtual, FLOAT, l.scores, l.scores_strides)?;
    g.pointwise(Mode::CUDNN_POINTWISE_GEN_INDEX, scores, None, None, Some(3), column)?;
    g.pointwise(Mode::CUDNN_POINTWISE_GEN_INDEX, scores, None, None, Some(2), row)?;
    g.two(Mode::CUDNN_POINTWISE_CMP_GE, row, column, seen)?;
    g.pointwise(Mode::CUDNN_POINTWISE_BINARY_SELECT, scores, Some(lowest), Some(seen), None, masked)?;
    Ok(masked)
}

fn forward_graph(l: &Layout) -> Result<(Graph, Ids)> {
    let mut graph = Graph::default();
    let g = &mut graph;
    let mut ids = Ids {
        q: g.tensor(Held::Memory, l.data, l.query, l.packed)?,
        k: g.tensor(Held::Memory, l.data, l.keys_turned, l.packed_turned)?,
        v: g.tensor(Held::Memory, l.data, l.keys, l.packed)?,
        out: g.tensor(Held::Memory, l.data, l.query, l.flat)?,
        stats: g.tensor(Held::Memory, FLOAT, l.row, l.row_strides)?,
        ..Ids::default()
    };
    ids.scale = g.value()?;
    ids.lowest = g.value()?;
    let float = |g: &mut Graph| g.tensor(Held::Virtual, FLOAT, l.scores, l.scores_strides);
    let of_row = |g: &mut Graph| g.tensor(Held::Virtual, FLOAT, l.row, l.row_strides);
    let (plain, scaled) = (float(g)?, float(g)?);
    g.matmul(ids.q, ids.k, plain)?;
    g.two(Mode::CUDNN_POINTWISE_MUL, plain, ids.scale, scaled)?;
    let seen = masked(g, l, scaled, ids.lowest)?;
    let (highest, below, weights) = (of_row(g)?, float(g)?, float(g)?);
    let (sum, log) = (of_row(g)?, of_row(g)?);
    let share = g.tensor(Held::Virtual, l.data, l.scores, l.scores_strides)?;
    g.reduce(sys::cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_MAX, false, seen, highest)?;
    g.two(Mode::CUDNN_POINTWISE_SUB, seen, highest, below)?;
    g.one(Mode::CUDNN_POINTWISE_EXP, below, weights)?;
    g.reduce(sys::cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_ADD, false, weights, sum)?;
    g.one(Mode::CUDNN_POINTWISE_LOG, sum, log)?;
    g.two(Mode::CUDNN_POINTWISE_ADD, highest, log, ids.stats)?;
    g.two(Mode::CUDNN_POINTWISE_DIV, weights, sum, share)?;
    g.matmul(share, ids.v, ids.out)?;
    Ok((graph, ids))
}

fn backward_graph(l: &Layout, shape: AttentionShape, deterministic: bool) -> Result<(Graph, Ids)> {
    let AttentionShape { seq: s, heads: h, head_dim: d, .. } = shape;
    let add = sys::cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_ADD;
    let dense = [h * s * d, s * d, d, 1];
    let mut graph = Graph::default();
    let g = &mut graph;
    let mut ids = Ids {
        q: g.tensor(Held::Memory, l.data, l.query, l.packed)?,
        k: g.tensor(Held::Memory, l.data, l.keys_turned, l.packed_turned)?,
        v: g.tensor(Held::Memory, l.data, l.keys_turned, l.packed_turned)?,
        out: g.tensor(Held::Memory, l.data, l.query, l.flat)?,
        stats: g.tensor(Held::Memory, FLOAT, l.row, l.row_strides)?,
        dout: g.tensor(Held::Memory, l.data, l.query, l.flat)?,
        dq: g.tensor(Held::Memory, l.data, l.query, l.packed)?,
        dk: g.tensor(Held::Memory, l.data, l.keys, l.packed)?,
        dv: g.tensor(Held::Memory, l.data, l.keys, l.packed)?,
        sums: g.tensor(Held::Memory, FLOAT, l.row, l.row_strides)?,
        dq_sum: g.tensor(Held::Memory, FLOAT, l.query, dense)?,
        ..Ids::default()
    };
    (ids.scale, ids.one, ids.lowest) = (g.value()?, g.value()?, g.value()?);
    let float = |g: &mut Graph| g.tensor(Held::Virtual, FLOAT, l.scores, l.scores_strides);
    let turned = |g: &mut Graph| g.tensor(Held::Virtual, l.data, l.scores, l.turned_strides);
    let of_head = |g: &mut Graph| g.tensor(Held::Virtual, l.data, l.query, dense);
    let grouped = shape.heads != shape.kv_heads;
    let (dp, plain) = (float(g)?, float(g)?);
    g.matmul(ids.dout, ids.v, dp)?;
    g.matmul(ids.q, ids.k, plain)?;
    let products = g.tensor(Held::Virtual, FLOAT, l.query, [h * s * d, s * d, h * d, 1])?;
    g.two(Mode::CUDNN_POINTWISE_MUL, ids.dout, ids.out, products)?;
    let keys = g.tensor(Held::Virtual, FLOAT, l.keys, l.packed)?;
    g.reshape(ids.k, keys)?;
    let (scaled, below) = (float(g)?, float(g)?);
    g.two(Mode::CUDNN_POINTWISE_MUL, plain, ids.scale, scaled)?;
    g.two(Mode::CUDNN_POINTWISE_SUB, scaled, ids.stats, below)?;
    let seen = masked(g, l, below, ids.lowest)?;
    let (weights, weights_turned) = (float(g)?, turned(g)?);
    g.one(Mode::CUDNN_POINTWISE_EXP, seen, weights)?;
    g.reshape(weights, weights_turned)?;
    let dv = if grouped { of_head(g)? } else { ids.dv };
    g.matmul(weights_turned, ids.dout, dv)?;
    let sum = g.tensor(Held::Virtual, FLOAT, l.row, l.row_strides)?;
    g.reduce(add, deterministic, products, sum)?;
    g.two(Mode::CUDNN_POINTWISE_MUL, sum, ids.one, ids.sums)?;
    let (centred, weighted, ds, ds_turned) = (float(g)?, float(g)?, float(g)?, turned(g)?);
    g.two(Mode::CUDNN_POINTWISE_SUB, dp, ids.sums, centred)?;
    g.two(Mode::CUDNN_POINTWISE_MUL, centred, weights, weighted)?;
    g.two(Mode::CUDNN_POINTWISE_MUL, weighted, ids.scale, ds)?;
    g.matmul(ds, keys, ids.dq_sum)?;
    g.one(Mode::CUDNN_POINTWISE_IDENTITY, ids.dq_sum, ids.dq)?;
    g.reshape(ds, ds_turned)?;
    let dk = if grouped { of_head(g)? } else { ids.dk };
    g.matmul(ds_turned, ids.q, dk)?;
    if grouped {
        g.reduce(add, deterministic, dk, ids.dk)?;
        g.reduce(add, deterministic, dv, ids.dv)?;
    }
    Ok((graph, ids))
}

/// The library, opened at its first use, and its plans.
#[derive(Default)]
pub(super) struct Cudnn {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    mode: CudnnAttention,
    /// Whether all documents are promised to be whole sequences.
    whole: bool,
    /// `Some(None)` where the library is missing or unusable.
    handle: Option<Option<sys::cudnnHandle_t>>,
    /// `None` where the library takes no such attention.
    plans: HashMap<Key, Option<Plan>>,
}

// SAFETY: the handle, plans and descriptors are only used under the lock.
unsafe impl Send for Cudnn {}
// SAFETY: as above.
unsafe impl Sync for Cudnn {}

impl Drop for Cudnn {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.plans.clear();
        if let Some(Some(handle)) = state.handle {
            // SAFETY: the handle is ours and used no more.
            let _ = unsafe { sys::cudnnDestroy(handle) };
        }
    }
}

impl State {
    /// The handle; `None`, said once, where there is no usable library.
    fn open(&mut self) -> Option<sys::cudnnHandle_t> {
        if let Some(handle) = self.handle {
            return handle;
        }
        let opened = std::panic::catch_unwind(|| {
            let library = libraries::cudnn_library();
            if library.path.is_none() || library.error.is_some() {
                return Err(library.error.unwrap_or_else(|| "libcudnn.so.9 is nowhere to be found".to_owned()));
            }
            let mut handle = std::ptr::null_mut();
            // SAFETY: the library writes a handle to a local; the context is current.
            let code = unsafe { sys::cudnnCreate(&raw mut handle) };
            check("cudnnCreate", code).map_err(|e| e.to_string())?;
            Ok(handle)
        });
        let opened = opened.unwrap_or_else(|_| Err("it lacks a function".to_owned()));
        if let Err(why) = &opened {
            tracing::info!("cuDNN is not used: {why}; attention runs on kernels of gpurun's own");
        }
        self.handle = Some(opened.ok());
        self.handle.flatten()
    }

    fn plan(&mut self, key: Key) -> Option<(sys::cudnnHandle_t, &Plan)> {
        let handle = self.open()?;
        let plan = self.plans.entry(key).or_insert_with(|| match build(key, handle) {
            Ok(plan) => Some(plan),
            Err(why) => {
                tracing::info!(?key, %why, "cuDNN takes no such attention; it runs on kernels of gpurun's own");
                None
            }
        });
        plan.as_ref().map(|plan| (handle, plan))
    }
}

fn build(key: Key, handle: sys::cudnnHandle_t) -> Result<Plan> {
    let layout = Layout::new(key.shape, key.dtype);
    let (graph, ids) =
        if key.backward { backward_graph(&layout, key.shape, key.deterministic)? } else { forward_graph(&layout)? };
    let (plan, workspace) = graph.plan(handle)?;
    Ok(Plan { plan, ids, workspace, _graph: graph })
}

/// Sizes and addresses that the graphs are made for.
fn takes(a: &Attention, addresses: &[u64]) -> bool {
    let AttentionShape { batch, seq, head_dim, .. } = a.shape;
    matches!(a.qkv.dtype, DType::Bf16 | DType::F16)
        && batch > 0
        && seq >= 128
        && seq.is_multiple_of(64)
        && head_dim.is_multiple_of(8)
        && (64..=128).contains(&head_dim)
        && addresses.iter().all(|address| address.is_multiple_of(16))
}

fn execute(handle: sys::cudnnHandle_t, plan: &Plan, bindings: &[(Tensor, *mut c_void)], workspace: u64) -> Result {
    let ids: Vec<i64> = bindings.iter().map(|(id, _)| *id as i64).collect();
    let pointers: Vec<*mut c_void> = bindings.iter().map(|(_, pointer)| *pointer).collect();
    let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
        .set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Type::CUDNN_TYPE_VOID_PTR, &pointers)?
        .set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Type::CUDNN_TYPE_INT64, &ids)?
        .set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Type::CUDNN_TYPE_VOID_PTR, &[workspace as *mut c_void])?
        .done("variant pack")?;
    // SAFETY: the pack binds every tensor of the plan that is held in memory or by value to memory of its size, and the
    // workspace has the size that the plan asked for.
    check("cudnnBackendExecute", unsafe { sys::cudnnBackendExecute(handle, plan.plan.0, pack.0) })
}

impl CudaBackend {
    /// Says when attention may go through cuDNN.
    pub fn set_cudnn_attention(&self, mode: CudnnAttention) {
        self.cudnn.state.lock().unwrap_or_else(PoisonError::into_inner).mode = mode;
    }

    /// How many kinds of attention (shape, type, direction) have gone through cuDNN so far.
    #[must_use]
    pub fn cudnn_plans(&self) -> usize {
        let state = self.cudnn.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.plans.values().flatten().count()
    }

    pub(super) fn set_whole_documents(&self, whole: bool) {
        self.cudnn.state.lock().unwrap_or_else(PoisonError::into_inner).whole = whole;
    }

    /// True when the operation has been enqueued; false when it must go another way.
    pub(super) fn cudnn_forward(&self, lane: Lane, a: &Attention) -> Result<bool> {
        let [qkv, out, lse] = [a.qkv, a.out, a.lse].map(|view| self.address(view));
        let mut state = self.cudnn.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.whole || state.mode == CudnnAttention::Off || !takes(a, &[qkv, out, lse]) {
            return Ok(false);
        }
        self.driver.enter()?;
        let key = Key { shape: a.shape, dtype: a.qkv.dtype, backward: false, deterministic: true };
        let Some((handle, plan)) = state.plan(key) else { return Ok(false) };
        let workspace = self.workspace(lane, plan.workspace)?;
        let (key, value) = packed_offsets(a);
        let (mut scale, mut lowest) = (a.scale, f32::NEG_INFINITY);
        let at = |address: u64| address as *mut c_void;
        let ids = plan.ids;
        let bindings = [
            (ids.q, at(qkv)),
            (ids.k, at(qkv + key)),
            (ids.v, at(qkv + value)),
            (ids.out, at(out)),
            (ids.stats, at(lse)),
            (ids.scale, (&raw mut scale).cast()),
            (ids.lowest, (&raw mut lowest).cast()),
        ];
        // SAFETY: handle and stream exist.
        check("cudnnSetStream", unsafe { sys::cudnnSetStream(handle, self.driver.stream(lane).cast()) })?;
        execute(handle, plan, &bindings, workspace)?;
        Ok(true)
    }

    /// As [`CudaBackend::cudnn_forward`].
    pub(super) fn cudnn_backward(&self, lane: Lane, b: &AttentionBackward) -> Result<bool> {
        let a = &b.forward;
        let [qkv, out, lse] = [a.qkv, a.out, a.lse].map(|view| self.address(view));
        let [dout, dqkv, scratch] = [b.dout, b.dqkv, a.scratch].map(|view| self.address(view));
        let mut state = self.cudnn.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.whole || state.mode == CudnnAttention::Off || !takes(a, &[qkv, out, lse, dout, dqkv, scratch]) {
            return Ok(false);
        }
        self.driver.enter()?;
        let deterministic = state.mode == CudnnAttention::Deterministic;
        let key = Key { shape: a.shape, dtype: a.qkv.dtype, backward: true, deterministic };
        let Some((handle, plan)) = state.plan(key) else { return Ok(false) };
        let sums = DType::F32.bytes(a.shape.batch * a.shape.heads * a.shape.seq * a.shape.head_dim).0;
        let own = sums.next_multiple_of(256);
        let workspace = self.workspace(lane, own + plan.workspace)?;
        let stream = self.driver.stream(lane);
        // SAFETY: the workspace has room for the sums, and work on the lane runs in order.
        let code = unsafe { driver_sys::cuMemsetD8Async(workspace, 0, sums as usize, stream) };
        check_driver("cuMemsetD8Async", code)?;
        let (key, value) = packed_offsets(a);
        let (mut scale, mut one, mut lowest) = (a.scale, 1.0f32, f32::NEG_INFINITY);
        let at = |address: u64| address as *mut c_void;
        let ids = plan.ids;
        let bindings = [
            (ids.q, at(qkv)),
            (ids.k, at(qkv + key)),
            (ids.v, at(qkv + value)),
            (ids.out, at(out)),
            (ids.stats, at(lse)),
            (ids.dout, at(dout)),
            (ids.dq, at(dqkv)),
            (ids.dk, at(dqkv + key)),
            (ids.dv, at(dqkv + value)),
            (ids.sums, at(scratch)),
            (ids.dq_sum, at(workspace)),
            (ids.scale, (&raw mut scale).cast()),
            (ids.one, (&raw mut one).cast()),
            (ids.lowest, (&raw mut lowest).cast()),
        ];
        // SAFETY: handle and stream exist.
        check("cudnnSetStream", unsafe { sys::cudnnSetStream(handle, stream.cast()) })?;
        execute(handle, plan, &bindings, workspace + own)?;
        Ok(true)
    }
}

/// Bytes from a packed row's queries to its keys, and to its values.
fn packed_offsets(a: &Attention) -> (u64, u64) {
    let AttentionShape { heads, kv_heads, head_dim, .. } = a.shape;
    let bytes = |heads: usize| a.qkv.dtype.bytes(heads * head_dim).0;
    (bytes(heads), bytes(heads + kv_heads))
}
