//! Sessions to checkpoints and back: names and element ranges only, so any arrangement can read what any other wrote.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpurun_checkpoint::{Checkpoint, Meta, PieceSource, Save, Scalar, Section, TensorShape};
use gpurun_device::ScalarSlot;

use crate::control::Control;
use crate::error::EngineError;
use crate::session::{Session, State};

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Steps done.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
}

/// What a checkpoint says of where it comes from.
#[derive(Clone, Debug, Default)]
pub struct Provenance {
    /// Sizes of the model.
    pub model: serde_json::Value,
    /// Options of the run.
    pub options: serde_json::Value,
}

/// The scalar state, by name in the manifest.
const SCALARS: [(ScalarSlot, &str); 5] = [
    (ScalarSlot::LossScale, "loss_scale"),
    (ScalarSlot::GoodSteps, "good_steps"),
    (ScalarSlot::AdamSteps, "adam_steps"),
    (ScalarSlot::SkippedSteps, "skipped_steps"),
    (ScalarSlot::SkippedInARow, "skipped_in_a_row"),
];

const fn section(state: State) -> Section {
    match state {
        State::Master => Section::Weight,
        State::M => Section::M,
        State::V => Section::V,
    }
}

/// Writes a checkpoint: every rank its own part, then rank 0 makes it one. Every rank must call it; returns its folder.
///
/// # Errors
/// When any rank failed, every rank gets an error and earlier checkpoints are as they were.
pub fn save(
    session: &Session,
    control: &Control,
    out: &Path,
    position: Position,
    provenance: &Provenance,
    keep: Option<usize>,
) -> Result<PathBuf, EngineError> {
    let save = Save::begin(out, position.step);
    let written = save.as_ref().map_err(|_| ()).map(|save| save.write_rank(session.rank(), pieces(session)));
    let failed = !matches!(written, Ok(Ok(_)));
    if control.any(failed)? {
        give_up(session, &save);
        // A rank that did its part says that another did not.
        save?;
        if let Ok(written) = written {
            written?;
        }
        return Err(EngineError::SaveElsewhere { out: out.to_owned() });
    }
    let save = save?;
    let world = session.world();
    let mut folder = out.join(format!("step-{:08}", position.step));
    if session.rank().0 == 0 {
        let committed = save.commit(meta(session, position, provenance)?, world, keep);
        control.any(committed.is_err())?;
        folder = committed?;
    } else if control.any(false)? {
        return Err(EngineError::SaveElsewhere { out: out.to_owned() });
    }
    Ok(folder)
}

/// Frees the disk of what was written of a save that cannot be finished.
fn give_up(session: &Session, save: &Result<Save, gpurun_checkpoint::Error>) {
    if let (Ok(save), true) = (save, session.rank().0 == 0)
        && let Err(error) = save.abort()
    {
        tracing::warn!("{error}");
    }
}

fn pieces(session: &Session) -> impl Iterator<Item = PieceSource<'_>> {
    session.owned_stretches().into_iter().map(move |stretch| {
        let region = stretch.region;
        PieceSource {
            tensor: stretch.name,
            section: section(stretch.state),
            start: stretch.start as u64,
            len: region.len as u64,
            dtype: session.dtype_of(region),
            fill: Box::new(move |at, out| {
                let part = gpurun_plan::Region { start: region.start + at as usize, len: out.len(), ..region };
                Ok(session.read_f32(part, out)?)
            }),
        }
    })
}

fn meta(session: &Session, position: Position, provenance: &Provenance) -> Result<Meta, EngineError> {
    let values = session.scalars()?;
    let scalars: BTreeMap<String, Scalar> =
        SCALARS.iter().map(|(slot, name)| ((*name).to_owned(), Scalar::F32(values[*slot as usize]))).collect();
    let tensors = session
        .model()
        .units
        .iter()
        .flat_map(|u| u.params())
        .map(|p| TensorShape { name: p.name, shape: p.shape })
        .collect();
    Ok(Meta {
        step: position.step,
        tokens: position.tokens,
        model: provenance.model.clone(),
        options: provenance.options.clone(),
        scalars,
        tensors,
    })
}

/// Fills a session from a checkpoint, whatever arrangement wrote it.
///
/// # Errors
/// When the checkpoint is of another model or cannot be read.
pub fn load(session: &Session, checkpoint: &Checkpoint) -> Result<Position, EngineError> {
    let meta = checkpoint.meta();
    check_model(session, checkpoint)?;
    session.restore(|name, state, start, out| Ok(checkpoint.read(name, section(state), start as u64, out)?))?;
    let mut values = session.scalars()?;
    for (slot, name) in SCALARS {
        match meta.scalars.get(name) {
            Some(Scalar::F32(value)) => values[slot as usize] = *value,
            _ => {
                let dir = checkpoint.dir().display();
                return Err(EngineError::Resume(format!("checkpoint {dir} has no scalar {name}")));
            }
        }
    }
    session.set_scalars(&values)?;
    Ok(Position { step: meta.step, tokens: meta.tokens })
}

fn check_model(session: &Session, checkpoint: &Checkpoint) -> Result<(), EngineError> {
    let dir = checkpoint.dir().display();
    let theirs: BTreeMap<&str, &[usize]> =
        checkpoint.meta().tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let mut ours = 0;
    for param in session.model().units.iter().flat_map(|u| u.params()) {
        ours += 1;
        match theirs.get(param.name.as_str()) {
            None => {
                return Err(EngineError::Resume(format!(
                    "checkpoint {dir} is of another model: it has no {}",
                    param.name
                )));
            }
            Some(shape) if *shape != param.shape.as_slice() => {
                return Err(EngineError::Resume(format!(
                    "checkpoint {dir} is of another model: {} has shape {shape:?} there and {:?} here",
                    param.name, param.shape
                )));
            }
            Some(_) => {}
        }
    }
    if ours != theirs.len() {
        let extra = theirs.len() - ours;
        return Err(EngineError::Resume(format!(
            "checkpoint {dir} is of another model: it has {extra} tensors that this one lacks"
        )));
    }
    Ok(())
}
