//! Chrome's trace format (Duan and others, "Trace Event Format"), which Perfetto opens.

use gpurun_types::{Lane, Place};
use serde_json::{Map, Value, json};

use super::Drawing;
use super::memory::Series;

/// One process a rank, one thread a lane, a counter a kind of memory. Times are in microseconds.
#[must_use]
pub fn trace(drawing: &Drawing<'_>) -> String {
    let mut events = Vec::new();
    for (rank, spans) in drawing.plan.ranks.iter().zip(&drawing.timeline.ranks) {
        let pid = rank.rank.0;
        events.push(named("process_name", pid, 0, &rank.rank.to_string()));
        for lane in Lane::ALL.into_iter().filter(|lane| rank.train.instrs.iter().any(|i| i.lane == *lane)) {
            events.push(named("thread_name", pid, lane.index(), &lane.to_string()));
        }
        for (index, (instr, span)) in rank.train.instrs.iter().zip(spans).enumerate() {
            let waits: Vec<u32> = instr.waits.iter().map(|w| w.0).collect();
            events.push(json!({
                "ph": "X", "name": instr.op.label(drawing.spec), "cat": instr.op.name(), "pid": pid,
                "tid": instr.lane.index(), "ts": micros(span.start), "dur": micros(span.end - span.start),
                "args": {"instruction": index, "after": waits},
            }));
        }
        for place in [Place::Device, Place::Host] {
            let series = Series::of(rank, spans, place);
            for (time, bytes) in &series.points {
                let by_kind: Map<String, Value> =
                    series.kinds.iter().zip(bytes).map(|(kind, b)| (kind.name().to_owned(), json!(b))).collect();
                if !by_kind.is_empty() {
                    let name = format!("{place} memory");
                    events.push(
                        json!({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": micros(*time), "args": by_kind}),
                    );
                }
            }
        }
    }
    let machine = &drawing.timeline.machine;
    let times = if drawing.measured {
        format!("measured; {}", machine.name)
    } else {
        format!("estimated; {}", machine.describe())
    };
    let other = json!({"title": drawing.title, "times": times});
    json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}).to_string()
}

fn micros(seconds: f64) -> f64 {
    seconds * 1e6
}

fn named(what: &str, pid: u32, tid: usize, name: &str) -> Value {
    json!({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})
}
