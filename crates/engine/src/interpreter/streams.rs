//! Lanes as streams, for backends whose operations are enqueued.

use std::sync::Arc;

use gpurun_device::Mark;
use gpurun_model::Mode;
use gpurun_types::Lane;

use super::{Fault, Interpreter, LogitsRequest, Prepared, Watcher};
use crate::error::EngineError;

impl Interpreter {
    pub(super) fn run_streams(
        &self,
        program: &Arc<Prepared>,
        mode: Mode,
        logits: Option<LogitsRequest>,
        step: u64,
        watcher: &dyn Watcher,
    ) -> Result<(), EngineError> {
        self.enqueue(program, mode, logits, watcher)
            .and_then(|()| self.settle(program))
            .map_err(|(instr, fault)| self.give_up(program, step, instr, fault))
    }

    fn enqueue(
        &self,
        program: &Prepared,
        mode: Mode,
        logits: Option<LogitsRequest>,
        watcher: &dyn Watcher,
    ) -> Result<(), (usize, Fault)> {
        let backend = &self.machine.backend;
        let mut marks: Vec<Option<Mark>> = vec![None; program.program.instrs.len()];
        for (index, instr) in program.program.instrs.iter().enumerate() {
            watcher.at(index as u32);
            let enqueue = || -> Result<Option<Mark>, Fault> {
                for wait in &instr.waits {
                    let mark = marks[wait.0 as usize].expect("an awaited instruction has a mark");
                    backend.wait(instr.lane, mark)?;
                }
                self.machine.run_instr(index, instr, mode, logits)?;
                Ok(if program.awaited[index] { Some(backend.record(instr.lane)?) } else { None })
            };
            marks[index] = enqueue().map_err(|fault| (index, fault))?;
            watcher.progressed();
        }
        Ok(())
    }

    fn settle(&self, program: &Prepared) -> Result<(), (usize, Fault)> {
        let instrs = &program.program.instrs;
        for lane in Lane::ALL {
            if let Some(last) = instrs.iter().rposition(|i| i.lane == lane) {
                self.machine.backend.synchronize(lane).map_err(|e| (last, Fault::Device(e)))?;
            }
        }
        // What failed while it ran freed its lane, and what came after it worked on nothing.
        let last = instrs.iter().rposition(|i| matches!(i.lane, Lane::Gather | Lane::Reduce));
        self.machine.links.check().map_err(|e| (last.unwrap_or(0), Fault::Comm(e)))
    }
}
