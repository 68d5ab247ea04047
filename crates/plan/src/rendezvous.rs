//! All ranks run together, lane by lane, with every collective and message a rendezvous: what the verifier proves to end, and
//! what the estimate puts times to.

use std::collections::BTreeMap;

use gpurun_types::{Lane, Rank};

use crate::ir::{Group, Instr, InstrId, Op, Parcel, Program};
use crate::spec::{Mesh, Micro, UnitId};
use crate::verify::{VerifyError, describe};

/// Whose programs are run.
#[derive(Clone, Copy)]
pub(crate) enum Cast {
    /// Those of every rank.
    All(Mesh),
    /// Those of the first replica of each stage: the others do the same at the same time.
    FirstReplicas(Mesh),
}

impl Cast {
    /// Indices of the programs in the group of program `index`.
    fn members(self, group: Group, index: usize) -> Vec<usize> {
        match (self, group) {
            (Self::All(mesh), Group::World) => (0..(mesh.dp * mesh.pp) as usize).collect(),
            (Self::All(mesh), Group::Data) => {
                let dp = mesh.dp as usize;
                (index / dp * dp..index / dp * dp + dp).collect()
            }
            (Self::FirstReplicas(mesh), Group::World) => (0..mesh.pp as usize).collect(),
            (Self::FirstReplicas(_), Group::Data) => vec![index],
        }
    }

    /// Index of a rank's program.
    fn index(self, rank: Rank) -> usize {
        match self {
            Self::All(_) => rank.index(),
            Self::FirstReplicas(mesh) => rank.index() / mesh.dp as usize,
        }
    }

    /// The rank of a program.
    fn rank(self, index: usize) -> Rank {
        match self {
            Self::All(_) => Rank(index as u32),
            Self::FirstReplicas(mesh) => Rank(index as u32 * mesh.dp),
        }
    }
}

/// One rank's lanes while all ranks are run together.
struct Cursor<'a> {
    instrs: &'a [Instr],
    /// Instructions of each lane, and how many of them are done.
    lanes: BTreeMap<Lane, (Vec<InstrId>, usize)>,
    done: Vec<bool>,
}

impl<'a> Cursor<'a> {
    fn new(program: &'a Program) -> Self {
        let mut lanes: BTreeMap<Lane, (Vec<InstrId>, usize)> = BTreeMap::new();
        for (index, instr) in program.instrs.iter().enumerate() {
            lanes.entry(instr.lane).or_default().0.push(InstrId(index as u32));
        }
        Self { instrs: &program.instrs, lanes, done: vec![false; program.instrs.len()] }
    }

    /// The instruction that a lane is at, and whether its waits are done.
    fn head(&self, lane: Lane) -> Option<(InstrId, bool)> {
        let (list, at) = self.lanes.get(&lane)?;
        let id = *list.get(*at)?;
        Some((id, self.instrs[id.0 as usize].waits.iter().all(|w| self.done[w.0 as usize])))
    }

    fn complete(&mut self, lane: Lane) {
        let (list, at) = self.lanes.get_mut(&lane).expect("the lane has a head");
        self.done[list[*at].0 as usize] = true;
        *at += 1;
    }

    fn op(&self, id: InstrId) -> &'a Op {
        &self.instrs[id.0 as usize].op
    }
}

/// Runs all ranks; `done` is told of the instructions, by rank, that complete together, each after those it waits for.
///
/// # Errors
/// A deadlock, or members of a group that disagree.
pub(crate) fn run(
    cast: Cast,
    programs: &[&Program],
    mut done: impl FnMut(&[(usize, InstrId)]),
) -> Result<(), VerifyError> {
    let mut cursors: Vec<Cursor<'_>> = programs.iter().map(|p| Cursor::new(p)).collect();
    loop {
        let mut moved = false;
        for rank in 0..cursors.len() {
            for lane in Lane::ALL {
                while let Some((id, true)) = cursors[rank].head(lane) {
                    let together = advance(cast, &mut cursors, rank, lane, id)?;
                    if together.is_empty() {
                        break;
                    }
                    done(&together);
                    moved = true;
                }
            }
        }
        if !moved {
            return stuck(&cursors);
        }
    }
}

/// Completes the instruction at the head of a lane if all who take part are there: they, by rank, or none.
fn advance(
    cast: Cast,
    cursors: &mut [Cursor<'_>],
    rank: usize,
    lane: Lane,
    id: InstrId,
) -> Result<Vec<(usize, InstrId)>, VerifyError> {
    let mut together = Vec::new();
    match cursors[rank].op(id) {
        Op::AllGather { group, .. } | Op::ReduceScatter { group, .. } => {
            let members = cast.members(*group, rank);
            for &member in &members {
                match cursors[member].head(lane) {
                    Some((_, false)) | None => return Ok(Vec::new()),
                    Some((other, true)) => {
                        agree(cursors, lane, (rank, id), (member, other))?;
                        together.push((member, other));
                    }
                }
            }
            members.into_iter().for_each(|m| cursors[m].complete(lane));
        }
        Op::Send { peer, .. } | Op::Recv { peer, .. } => {
            let peer = cast.index(*peer);
            let Some((theirs, other)) = partner(&cursors[peer], cast.rank(rank), cursors[rank].op(id)) else {
                return Ok(Vec::new());
            };
            agree(cursors, lane, (rank, id), (peer, other))?;
            cursors[rank].complete(lane);
            cursors[peer].complete(theirs);
            together.extend([(rank, id), (peer, other)]);
        }
        _ => {
            cursors[rank].complete(lane);
            together.push((rank, id));
        }
    }
    Ok(together)
}

/// The lane of `cursor` whose ready head is the other side of a message with `rank`. Messages from one rank to another arrive
/// in the order in which they are sent, so this must be the right one.
fn partner(cursor: &Cursor<'_>, rank: Rank, op: &Op) -> Option<(Lane, InstrId)> {
    let other_side = |id: &InstrId| match (op, cursor.op(*id)) {
        (Op::Send { .. }, Op::Recv { peer, .. }) | (Op::Recv { .. }, Op::Send { peer, .. }) => *peer == rank,
        _ => false,
    };
    Lane::ALL.into_iter().find_map(|lane| {
        let (id, ready) = cursor.head(lane)?;
        Some((lane, id)).filter(|(_, id)| ready && other_side(id))
    })
}

/// What the members of a collective, or the two sides of a message, must agree on.
#[derive(PartialEq)]
enum Signature {
    /// Kind, unit, group, elements of the shard and of the whole.
    Collective(&'static str, Option<UnitId>, Group, usize, usize),
    /// What, of which unit and micro-batch, elements.
    Message(Parcel, UnitId, Micro, usize),
}

fn signature(op: &Op) -> Option<Signature> {
    Some(match op {
        Op::AllGather { unit, group, src, dst } => Signature::Collective(op.name(), *unit, *group, src.len, dst.len),
        Op::ReduceScatter { unit, group, src, dst, .. } => {
            Signature::Collective(op.name(), Some(*unit), *group, src.len, dst.len)
        }
        Op::Send { parcel, unit, micro, src: region, .. } | Op::Recv { parcel, unit, micro, dst: region, .. } => {
            Signature::Message(*parcel, *unit, *micro, region.len)
        }
        _ => return None,
    })
}

fn agree(
    cursors: &[Cursor<'_>],
    lane: Lane,
    (rank, id): (usize, InstrId),
    (member, other): (usize, InstrId),
) -> Result<(), VerifyError> {
    let (mine, theirs) = (cursors[rank].op(id), cursors[member].op(other));
    if signature(mine) == signature(theirs) {
        return Ok(());
    }
    Err(VerifyError::Order {
        lane,
        first_rank: Rank(rank as u32),
        first: words(&cursors[rank], id),
        second_rank: Rank(member as u32),
        second: words(&cursors[member], other),
    })
}

fn words(cursor: &Cursor<'_>, id: InstrId) -> String {
    let what = match signature(cursor.op(id)) {
        Some(Signature::Collective(_, Some(unit), ..)) => format!(" of unit {}", unit.0),
        Some(Signature::Message(parcel, unit, micro, _)) => {
            format!(" of the {} unit {}, micro-batch {}", parcel.words(), unit.0, micro.0)
        }
        _ => String::new(),
    };
    format!("{}{what}", describe(cursor.instrs, id))
}

/// Nobody can move: done, or a deadlock, told by what each rank's lanes are at.
fn stuck(cursors: &[Cursor<'_>]) -> Result<(), VerifyError> {
    let mut lines = Vec::new();
    for (rank, cursor) in cursors.iter().enumerate() {
        for lane in Lane::ALL {
            if let Some((id, ready)) = cursor.head(lane) {
                let why = if ready { "waits for its partners" } else { "waits for other lanes" };
                lines.push(format!("rank {rank}, {lane} lane, {}: {why}", words(cursor, id)));
            }
        }
    }
    if lines.is_empty() { Ok(()) } else { Err(VerifyError::Deadlock(lines.join("; "))) }
}
