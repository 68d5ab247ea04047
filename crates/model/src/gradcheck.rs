//! Analytic gradients against finite differences.

use std::fmt;

use gpurun_device::{Backend, DeviceError};
use gpurun_types::{DType, View};

use crate::reference::{Batch, Inputs, UnitMemory, allocate, read, write};
use crate::{BatchShape, Init, JOIN_ALIGN, Mode, Param, Unit, init};

/// One element of a tensor whose gradient was checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Element {
    /// Parameter name, or `input`.
    pub tensor: String,
    /// Row-major index.
    pub index: usize,
    /// What the backward says.
    pub analytic: f64,
    /// What differences of the forward say.
    pub numeric: f64,
    /// `|analytic - numeric|` over the root mean square of the tensor's gradient.
    pub error: f64,
}

/// Result of [`gradcheck`].
#[derive(Clone, Debug)]
pub struct Report {
    /// The element of each tensor with the largest error, parameters first, then `input`.
    pub tensors: Vec<Element>,
    /// Number of elements compared.
    pub elements: usize,
}

impl Report {
    /// The element with the largest error of all.
    ///
    /// # Panics
    /// When nothing was checked: [`gradcheck`] always checks something.
    #[must_use]
    pub fn worst(&self) -> &Element {
        self.tensors.iter().max_by(|a, b| a.error.total_cmp(&b.error)).expect("a unit has parameters or an input")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let w = self.worst();
        write!(
            f,
            "{} elements of {} tensors; worst {}[{}]: backward {:.6e}, differences {:.6e}, error {:.2e} of the tensor's root \
             mean square",
            self.elements,
            self.tensors.len(),
            w.tensor,
            w.index,
            w.analytic,
            w.numeric,
            w.error
        )
    }
}

/// Elements of one tensor that are compared at most; spread evenly.
const MOST: usize = 96;

/// Step of the differences, relative to values of order one. The fourth-order stencil leaves an error of `STEP^4`, and fp32
/// rounding leaves about `1e-7 / STEP`.
const STEP: f64 = 0.04;

/// Compares the gradients of `unit` (parameters and input) with central differences of its forward, in fp32.
///
/// The objective is a random projection of the output, summed in fp64. Weights and input are random; each sequence holds two
/// documents. For a unit that reads tokens or targets, or borrows parameters, see [`gradcheck_end`].
///
/// # Errors
/// When the backend fails.
pub fn gradcheck(unit: &dyn Unit, backend: &dyn Backend, shape: BatchShape) -> Result<Report, DeviceError> {
    gradcheck_end(unit, &[], 1, backend, shape)
}

/// As [`gradcheck`], for a unit at an end of the chain: token ids are random below `vocabulary`, `borrowed` are the parameters
/// that [`Unit::borrows`] names, and the objective of the loss unit is the mean loss.
///
/// # Errors
/// When the backend fails.
pub fn gradcheck_end(
    unit: &dyn Unit,
    borrowed: &[Param],
    vocabulary: usize,
    backend: &dyn Backend,
    shape: BatchShape,
) -> Result<Report, DeviceError> {
    let check = Check::new(unit, borrowed, vocabulary, backend, shape)?;
    let gradients = check.analytic()?;
    let mut report = Report { tensors: Vec::new(), elements: 0 };
    for (tensor, gradient) in check.tensors.iter().zip(&gradients) {
        let square = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
        let scale = (square / gradient.len() as f64).sqrt().max(f64::from(f32::MIN_POSITIVE));
        let stride = tensor.values.len().div_ceil(MOST);
        let mut worst: Option<Element> = None;
        // An odd offset per row of picks, so that a stride that divides the width does not test one column only.
        for pick in (0..tensor.values.len()).step_by(stride) {
            let index = (pick + pick / stride % stride).min(tensor.values.len() - 1);
            let numeric = check.differences(tensor, index)?;
            let analytic = f64::from(gradient[index]);
            let error = (analytic - numeric).abs() / scale;
            let error = if error.is_finite() { error } else { f64::INFINITY };
            report.elements += 1;
            if worst.as_ref().is_none_or(|w| error > w.error) {
                worst = Some(Element { tensor: tensor.name.clone(), index, analytic, numeric, error });
            }
        }
        report.tensors.extend(worst);
    }
    Ok(report)
}

/// A tensor that the objective depends on.
struct Variable {
    name: String,
    view: View,
    values: Vec<f32>,
    /// Typical size of its values, which the step is relative to.
    scale: f64,
}

struct Check<'a> {
    unit: &'a dyn Unit,
    backend: &'a dyn Backend,
    shape: BatchShape,
    memory: UnitMemory,
    inputs: Inputs,
    batch: Batch,
    /// Parameters, then the input.
    tensors: Vec<Variable>,
    x: Option<View>,
    y: Option<View>,
    /// The output's factors in the objective.
    projection: Vec<f32>,
}

impl<'a> Check<'a> {
    fn new(
        unit: &'a dyn Unit,
        borrowed: &[Param],
        vocabulary: usize,
        backend: &'a dyn Backend,
        shape: BatchShape,
    ) -> Result<Self, DeviceError> {
        let mut memory = UnitMemory::new(backend, unit, shape, DType::F32)?;
        for param in borrowed {
            memory.weights.push(allocate(backend, param.elements(), DType::F32)?);
            memory.grads.push(allocate(backend, param.elements(), DType::F32)?);
        }
        let edge =
            |width: usize| (width > 0).then(|| allocate(backend, shape.tokens() * width, DType::F32)).transpose();
        let (x, y) = (edge(unit.input_width())?, edge(unit.output_width())?);
        let params: Vec<Param> = unit.params().into_iter().chain(borrowed.iter().cloned()).collect();
        let mut tensors: Vec<Variable> =
            params.iter().zip(&memory.weights).map(|(param, &view)| variable(param, view)).collect();
        if let Some(view) = x {
            let values = normals("input", view.len, 1.0);
            tensors.push(Variable { name: "input".to_owned(), view, values, scale: 1.0 });
        }
        for tensor in &tensors {
            write(backend, &tensor.values, tensor.view)?;
        }
        Ok(Self {
            unit,
            backend,
            shape,
            memory,
            inputs: Inputs::new(backend, shape)?,
            batch: random_batch(shape, vocabulary),
            tensors,
            x,
            y,
            projection: normals("projection", y.map_or(0, |y| y.len), 1.0),
        })
    }

    fn factor(&self) -> f32 {
        1.0 / self.batch.loss_tokens().max(1) as f32
    }

    /// Gradients of the objective, in the order of `tensors`.
    fn analytic(&self) -> Result<Vec<Vec<f32>>, DeviceError> {
        let (backend, memory) = (self.backend, &self.memory);
        self.inputs.load(backend, &self.batch, 1.0)?;
        let cx = self.inputs.cx(backend, self.shape, DType::F32, Mode::Train, self.factor(), &memory.scratch);
        let dx = self.x.map(|x| allocate(backend, x.len, DType::F32)).transpose()?;
        let dy = self.y.map(|y| allocate(backend, y.len, DType::F32)).transpose()?;
        if let Some(dy) = dy {
            write(backend, &self.projection, dy)?;
            self.unit.forward(&cx, &memory.weights, self.x, self.y, &memory.saved)?;
        }
        self.unit.backward(&cx, &memory.weights, &memory.grads, self.x, dy, dx, &memory.saved)?;
        memory.grads.iter().chain(&dx).map(|&view| read(backend, view)).collect()
    }

    /// The objective's derivative by one element: differences at one and two steps, combined so that the third-order terms
    /// cancel.
    fn differences(&self, tensor: &Variable, index: usize) -> Result<f64, DeviceError> {
        let step = STEP * tensor.scale;
        let at = |steps: f64| {
            let moved = f64::from(tensor.values[index]) + steps * step;
            self.set(tensor, index, moved as f32)?;
            // The step that fp32 made of it.
            Ok::<_, DeviceError>((f64::from(moved as f32), self.objective()?))
        };
        let slope = |(x1, f1): (f64, f64), (x0, f0): (f64, f64)| (f1 - f0) / (x1 - x0);
        let near = slope(at(1.0)?, at(-1.0)?);
        let far = slope(at(2.0)?, at(-2.0)?);
        self.set(tensor, index, tensor.values[index])?;
        Ok((4.0 * near - far) / 3.0)
    }

    fn set(&self, tensor: &Variable, index: usize, value: f32) -> Result<(), DeviceError> {
        write(self.backend, &[value], tensor.view.slice(index, 1))
    }

    fn objective(&self) -> Result<f64, DeviceError> {
        let (backend, memory) = (self.backend, &self.memory);
        self.inputs.load(backend, &self.batch, 1.0)?;
        let mode = if self.y.is_some() { Mode::Train } else { Mode::Evaluate };
        let cx = self.inputs.cx(backend, self.shape, DType::F32, mode, self.factor(), &memory.scratch);
        self.unit.forward(&cx, &memory.weights, self.x, self.y, &memory.saved)?;
        match self.y {
            Some(y) => {
                let out = read(backend, y)?;
                Ok(out.iter().zip(&self.projection).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum())
            }
            None => Ok(self.inputs.loss(backend)? * f64::from(self.factor())),
        }
    }
}

fn normals(name: &str, len: usize, std: f32) -> Vec<f32> {
    let mut values = vec![0.0; len];
    init::fill(17, name, Init::Normal { std }, 0, &mut values);
    values
}

/// A parameter with values that make a unit's every part matter: matrices keep the scale of what they multiply, norm
/// weights are near one and biases not zero.
fn variable(param: &Param, view: View) -> Variable {
    let fan_in = param.shape.last().copied().unwrap_or(1).max(JOIN_ALIGN);
    let (mean, std) = match param.init {
        Init::Ones => (1.0, 0.2),
        Init::Zeros => (0.0, 0.2),
        Init::Normal { .. } => (0.0, 1.0 / (fan_in as f32).sqrt()),
    };
    let values = normals(&param.name, view.len, std).into_iter().map(|v| mean + v).collect();
    Variable { name: param.name.clone(), view, values, scale: f64::from(mean.max(std)) }
}

/// Random tokens; sequences of two documents, cut at different places; no target at a document's last token.
fn random_batch(shape: BatchShape, vocabulary: usize) -> Batch {
    let ids = normals("tokens", shape.tokens(), 1.0e6);
    let tokens: Vec<i32> = ids.iter().map(|v| (v.abs() as usize % vocabulary) as i32).collect();
    let mut batch = Batch { targets: Vec::new(), starts: Vec::new(), tokens };
    for row in 0..shape.tokens() {
        let (sequence, position) = (row / shape.seq, row % shape.seq);
        let cut = (shape.seq / 2 + sequence) % shape.seq;
        let ends = position + 1 == cut || position + 1 == shape.seq;
        batch.starts.push(if position < cut { 0 } else { cut as i32 });
        batch.targets.push(if ends { -1 } else { batch.tokens[row + 1] });
    }
    batch
}
