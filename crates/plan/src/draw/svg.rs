//! A picture: memory over the step, stacked by name, over the lanes as a Gantt chart.

use std::fmt::Write as _;

use gpurun_types::{Bytes, Lane, Place};

use super::Drawing;
use super::memory::Series;
use crate::estimate::Span;
use crate::ir::{Kind, Op, Part, RankPlan};
use crate::spec::ModelSpec;

const WIDTH: f64 = 1600.0;
const LEFT: f64 = 110.0;
const RIGHT: f64 = 250.0;
const PLOT: f64 = WIDTH - LEFT - RIGHT;
const ROW: f64 = 26.0;
const DEVICE_PANEL: f64 = 230.0;
const HOST_PANEL: f64 = 110.0;
/// Ranks drawn at most; a trace has them all.
const MOST: usize = 8;

/// The picture of a step: of replicas, which do the same, one is drawn for each stage.
#[must_use]
pub fn svg(drawing: &Drawing<'_>) -> String {
    let mut page = Page { out: String::new(), seconds: drawing.timeline.seconds.max(1e-9), y: 0.0 };
    page.head(drawing);
    let dp = drawing.plan.options.mesh.dp as usize;
    let shown: Vec<usize> = (0..drawing.plan.ranks.len()).step_by(dp).take(MOST).collect();
    for index in shown {
        let (rank, spans) = (&drawing.plan.ranks[index], &drawing.timeline.ranks[index]);
        let alike = if dp > 1 {
            format!("rank {index} (ranks {index} to {} alike)", index + dp - 1)
        } else {
            format!("rank {index}")
        };
        let busy = drawing.timeline.busy(drawing.plan, index, Lane::Compute) / page.seconds * 100.0;
        page.y += 34.0;
        page.text(LEFT, page.y, &format!("{alike}: compute lane busy for {busy:.0} % of the step"), "heading");
        page.y += 14.0;
        page.memory(rank, spans, Place::Device, rank.device_bytes, DEVICE_PANEL);
        if rank.host_bytes.0 > 0 {
            page.memory(rank, spans, Place::Host, rank.host_bytes, HOST_PANEL);
        }
        page.lanes(rank, spans, drawing.spec);
    }
    page.finish()
}

struct Page {
    out: String,
    seconds: f64,
    /// Where the next part begins.
    y: f64,
}

impl Page {
    fn head(&mut self, drawing: &Drawing<'_>) {
        self.text(LEFT, 40.0, drawing.title, "title");
        let step = duration(drawing.timeline.seconds);
        let machine = drawing.timeline.machine.describe();
        let how = if drawing.measured { "measured on" } else { "estimated for" };
        self.text(LEFT, 64.0, &format!("One training step, {step}, {how} {machine}"), "small");
        let mut x = LEFT;
        for (what, colour) in OPERATIONS {
            self.rect([x, 78.0, 12.0, 12.0], colour, None);
            self.text(x + 17.0, 88.5, what, "small");
            x += 34.0 + 6.6 * what.len() as f64;
        }
        self.y = 92.0;
    }

    fn x(&self, time: f64) -> f64 {
        LEFT + time / self.seconds * PLOT
    }

    /// Areas of memory by kind, the arena's size as a line, a legend with each kind's most bytes.
    fn memory(&mut self, rank: &RankPlan, spans: &[Span], place: Place, arena: Bytes, height: f64) {
        let series = Series::of(rank, spans, place);
        let top = self.y;
        let scale = height / (arena.0.max(series.highest()).max(1) as f64 * 1.04);
        let level = |bytes: u64| top + height - bytes as f64 * scale;
        self.grid(top, height);
        let unit = unit_of(arena.0);
        for tick in ticks(arena.0 as f64 / unit.1, 4) {
            let y = level((tick * unit.1) as u64);
            self.line([LEFT, y, LEFT + PLOT, y], "grid");
            self.text(LEFT - 8.0, y + 4.0, &format!("{tick} {}", unit.0), "axis-y");
        }
        self.text(18.0, top + 12.0, &place.to_string(), "lane");
        let mut below = vec![0u64; series.points.len()];
        let mut legend = Vec::new();
        for (k, kind) in series.kinds.iter().enumerate() {
            let above: Vec<u64> = series.points.iter().zip(&below).map(|((_, bytes), b)| b + bytes[k]).collect();
            let most = series.points.iter().map(|(_, bytes)| bytes[k]).max().unwrap_or(0);
            self.area(&series, &below, &above, level, *kind, most);
            legend.push((kind.name(), colour_of(*kind), most));
            below = above;
        }
        let y = level(arena.0);
        self.line([LEFT, y, LEFT + PLOT, y], "arena");
        self.text(LEFT + PLOT + 12.0, y + 4.0, &format!("arena {arena}"), "small");
        let step = 17.0f64.min((height - 20.0) / legend.len().max(1) as f64);
        let mut y = top + height - step * (legend.len() as f64 - 0.5);
        for (name, colour, most) in legend.into_iter().rev() {
            self.rect([LEFT + PLOT + 12.0, y - 9.0, 11.0, 11.0], colour, None);
            self.text(LEFT + PLOT + 29.0, y + 0.5, &format!("{name} {}", Bytes(most)), "small");
            y += step;
        }
        self.y = top + height + 16.0;
    }

    fn area(
        &mut self,
        series: &Series,
        below: &[u64],
        above: &[u64],
        level: impl Fn(u64) -> f64,
        kind: Kind,
        most: u64,
    ) {
        let ends: Vec<f64> = series.points.iter().skip(1).map(|p| p.0).chain([self.seconds]).collect();
        let mut path = String::new();
        for (i, ((from, _), to)) in series.points.iter().zip(&ends).enumerate() {
            let command = if i == 0 { 'M' } else { 'L' };
            let y = level(above[i]);
            let _ = write!(path, "{command}{:.2} {y:.2}L{:.2} {y:.2}", self.x(*from), self.x(*to));
        }
        for (i, ((from, _), to)) in series.points.iter().zip(&ends).enumerate().rev() {
            let y = level(below[i]);
            let _ = write!(path, "L{:.2} {y:.2}L{:.2} {y:.2}", self.x(*to), self.x(*from));
        }
        let _ = writeln!(
            self.out,
            "<path d=\"{path}Z\" fill=\"{}\"><title>{}: at most {}</title></path>",
            colour_of(kind),
            kind.name(),
            Bytes(most)
        );
    }

    /// One row a lane, one box an instruction.
    fn lanes(&mut self, rank: &RankPlan, spans: &[Span], spec: &ModelSpec) {
        let used = |lane: &Lane| rank.train.instrs.iter().any(|i| i.lane == *lane);
        let lanes: Vec<Lane> = Lane::ALL.into_iter().filter(used).collect();
        let (top, height) = (self.y, ROW * lanes.len() as f64);
        self.grid(top, height);
        for (row, lane) in lanes.iter().enumerate() {
            let y = top + ROW * row as f64;
            self.line([LEFT, y, LEFT + PLOT, y], "grid");
            self.text(LEFT - 8.0, y + ROW * 0.66, &lane.to_string(), "axis-y");
            for (instr, span) in rank.train.instrs.iter().zip(spans).filter(|(i, _)| i.lane == *lane) {
                let (x, end) = (self.x(span.start), self.x(span.end));
                // Too short to see is still there.
                let width = (end - x).max(0.8);
                let title = format!("{}: {} to {}", instr.op.label(spec), duration(span.start), duration(span.end));
                self.rect([x, y + 3.0, width, ROW - 6.0], OPERATIONS[category(&instr.op)].1, Some(&title));
                let short = short(&instr.op, spec);
                if width > 6.0 * short.len() as f64 + 6.0 {
                    self.text(x + width / 2.0, y + ROW * 0.66, short, "box");
                }
            }
        }
        self.line([LEFT, top + height, LEFT + PLOT, top + height], "grid");
        self.y = top + height + 16.0;
        for tick in ticks(self.seconds * 1e3, 10) {
            self.text(self.x(tick / 1e3), self.y, &format!("{tick} ms"), "axis-x");
        }
    }

    fn grid(&mut self, top: f64, height: f64) {
        for tick in ticks(self.seconds * 1e3, 10) {
            let x = self.x(tick / 1e3);
            self.line([x, top, x, top + height], "grid");
        }
    }

    fn rect(&mut self, [x, y, width, height]: [f64; 4], fill: &str, title: Option<&str>) {
        let _ = write!(
            self.out,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\""
        );
        let _ = match title {
            Some(title) => writeln!(self.out, " class=\"i\"><title>{}</title></rect>", escaped(title)),
            None => writeln!(self.out, "/>"),
        };
    }

    fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], class: &str) {
        let _ =
            writeln!(self.out, "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" class=\"{class}\"/>");
    }

    fn text(&mut self, x: f64, y: f64, text: &str, class: &str) {
        let _ = writeln!(self.out, "<text x=\"{x:.2}\" y=\"{y:.2}\" class=\"{class}\">{}</text>", escaped(text));
    }

    fn finish(self) -> String {
        let height = self.y + 24.0;
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"Helvetica, Arial, sans-serif\">\n<style>{STYLE}</style>\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.out
        )
    }
}

const STYLE: &str = ".title{font-size:22px;font-weight:bold;fill:#1f2933}.heading{font-size:15px;font-weight:bold;fill:#1f2933}\
.small{font-size:12px;fill:#3e4c59}.lane{font-size:12px;font-weight:bold;fill:#3e4c59}\
.axis-y{font-size:12px;fill:#3e4c59;text-anchor:end}.axis-x{font-size:12px;fill:#3e4c59;text-anchor:middle}\
.box{font-size:11px;fill:#ffffff;text-anchor:middle;pointer-events:none}.grid{stroke:#d9dee4;stroke-width:1}\
.arena{stroke:#b42318;stroke-width:1.5;stroke-dasharray:6 4}.i{stroke:#ffffff;stroke-width:0.3}";

/// Kinds of instructions, and their colours.
const OPERATIONS: [(&str, &str); 9] = [
    ("forward", "#2f6fb2"),
    ("computed again", "#7fb2e5"),
    ("backward", "#12806a"),
    ("gradients of weights", "#5fb39f"),
    ("weights gathered", "#8a5fb0"),
    ("gradients reduced", "#c2703d"),
    ("to and from stages", "#b0447c"),
    ("optimizer", "#c23b3b"),
    ("copies, zeros, norms", "#8a94a0"),
];

const fn category(op: &Op) -> usize {
    match op {
        Op::Forward { again: false, .. } => 0,
        Op::Forward { again: true, .. } | Op::Restore { .. } => 1,
        Op::Backward { part: Part::Weights, .. } => 3,
        Op::Backward { .. } => 2,
        Op::AllGather { .. } => 4,
        Op::ReduceScatter { .. } => 5,
        Op::Send { .. } | Op::Recv { .. } => 6,
        Op::Adam { .. } => 7,
        Op::LoadBatch { .. }
        | Op::Zero { .. }
        | Op::Add { .. }
        | Op::Norm { .. }
        | Op::Scalars { .. }
        | Op::Copy { .. } => 8,
    }
}

/// What a box says: the unit, where there is one.
fn short<'a>(op: &'a Op, spec: &'a ModelSpec) -> &'a str {
    match op {
        Op::Forward { unit, .. }
        | Op::Restore { unit, .. }
        | Op::Backward { unit, .. }
        | Op::ReduceScatter { unit, .. }
        | Op::AllGather { unit: Some(unit), .. }
        | Op::Send { unit, .. }
        | Op::Recv { unit, .. }
        | Op::Add { unit, .. }
        | Op::Copy { unit, .. } => &spec.units[unit.0 as usize].name,
        Op::Adam { parts, .. } if parts.len() == 1 => &spec.units[parts[0].unit.0 as usize].name,
        _ => op.name(),
    }
}

const fn colour_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Weights => "#2f6fb2",
        Kind::Gradients => "#c2703d",
        Kind::Master => "#5a4fa3",
        Kind::MomentM => "#8479c9",
        Kind::MomentV => "#b3abe3",
        Kind::Activations => "#12806a",
        Kind::Logits => "#8cc152",
        Kind::Communication => "#b0447c",
        Kind::Workspace => "#d9b44a",
        Kind::Batch => "#5f6b76",
        Kind::Scalars => "#aab4bd",
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // Not allowed in XML at all.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.3} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

fn unit_of(bytes: u64) -> (&'static str, f64) {
    const UNITS: [(&str, f64); 4] = [("GiB", 1_073_741_824.0), ("MiB", 1_048_576.0), ("KiB", 1024.0), ("B", 1.0)];
    UNITS.into_iter().find(|(_, unit)| bytes as f64 >= *unit).unwrap_or(UNITS[3])
}

/// Round numbers from 0 to `end`, at most about `most`.
fn ticks(end: f64, most: usize) -> Vec<f64> {
    let rough = (end / most as f64).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|f| f * power).find(|s| *s >= rough).unwrap_or(10.0 * power);
    let decimals = (-step.log10().floor()).max(0.0) as i32;
    let round = |x: f64| (x * 10f64.powi(decimals)).round() / 10f64.powi(decimals);
    (0..).map(|i| round(f64::from(i) * step)).take_while(|t| *t <= end).collect()
}
