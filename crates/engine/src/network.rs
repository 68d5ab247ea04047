//! The communicators of one rank, by group and lane.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpurun_comm::{CommError, Communicator, Fabric, Solo};
use gpurun_device::Backend;
use gpurun_plan::{Group, Mesh, Op, RankPlan};
use gpurun_types::{Lane, Rank};

/// Makes communicators. Every rank asks for the same ones in the same order.
pub trait Network {
    /// A communicator of `members` (this rank among them) on its own channel, for work on `lane`.
    fn communicator(&self, channel: u32, members: &[Rank], lane: Lane) -> Result<Arc<dyn Communicator>, CommError>;
}

/// Communicators in host memory that the backend's operations and the host both address.
pub struct HostNetwork {
    /// Shared memory of the ranks; `None` for a single rank.
    pub fabric: Option<Arc<Fabric>>,
    /// Whose views are sent.
    pub backend: Arc<dyn Backend>,
}

impl Network for HostNetwork {
    fn communicator(&self, channel: u32, members: &[Rank], _lane: Lane) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(match &self.fabric {
            Some(fabric) => Arc::new(fabric.communicator(channel, members, self.backend.clone())?),
            None => Arc::new(Solo::new(members[0], self.backend.clone())),
        })
    }
}

/// The communicators that a plan can name.
pub struct Links {
    by_lane: BTreeMap<(Group, Lane), Arc<dyn Communicator>>,
    /// Messages, by sender and receiver. Each way has a communicator of its own, so that each is used by one lane.
    messages: BTreeMap<(Rank, Rank), Arc<dyn Communicator>>,
}

/// First channel of messages: collectives have those below.
const MESSAGES: u32 = 4;

impl Links {
    /// Opens what the plan of `rank` needs: collectives of the data-parallel group and of the world on each lane that has
    /// them, and one communicator of two for each rank that it sends to, or receives from.
    pub fn open(network: &dyn Network, mesh: Mesh, plan: &RankPlan) -> Result<Self, CommError> {
        let rank = plan.rank;
        let world: Vec<Rank> = (0..mesh.dp * mesh.pp).map(Rank).collect();
        let first = rank.0 / mesh.dp * mesh.dp;
        let data: Vec<Rank> = (first..first + mesh.dp).map(Rank).collect();
        let mut by_lane: BTreeMap<(Group, Lane), Arc<dyn Communicator>> = BTreeMap::new();
        let mut channel = 0;
        for (group, members) in [(Group::Data, &data), (Group::World, &world)] {
            for lane in [Lane::Gather, Lane::Reduce] {
                if members.len() > 1 {
                    // Groups of one kind do not overlap, so they may share a channel number. Work of one lane runs in
                    // order, so groups of the same members share a communicator.
                    let same = by_lane.get(&(Group::Data, lane)).filter(|_| data == world).cloned();
                    let link = match same {
                        Some(link) => link,
                        None => network.communicator(channel, members, lane)?,
                    };
                    by_lane.insert((group, lane), link);
                }
                channel += 1;
            }
        }
        debug_assert_eq!(channel, MESSAGES);
        let mut links: Vec<(Rank, Rank, Lane)> = Vec::new();
        for instr in plan.train.instrs.iter().chain(&plan.evaluate.instrs) {
            match instr.op {
                Op::Send { peer, .. } => links.push((rank, peer, instr.lane)),
                Op::Recv { peer, .. } => links.push((peer, rank, instr.lane)),
                _ => {}
            }
        }
        // Both ends see the same links of theirs in the same order, lower stages first.
        links.sort_unstable_by_key(|(from, to, _)| (from.min(to).0, from.max(to).0, from.0));
        links.dedup_by_key(|(from, to, _)| (*from, *to));
        let mut messages = BTreeMap::new();
        for (from, to, lane) in links {
            let members = [from.min(to), from.max(to)];
            messages.insert((from, to), network.communicator(message_channel(mesh, from, to), &members, lane)?);
        }
        Ok(Self { by_lane, messages })
    }

    /// The communicator of a group on a lane.
    ///
    /// # Panics
    /// When a plan names one that `open` did not make: a bug of the plan.
    pub fn group(&self, group: Group, lane: Lane) -> &dyn Communicator {
        self.by_lane
            .get(&(group, lane))
            .unwrap_or_else(|| panic!("no communicator of {group:?} on lane {lane}"))
            .as_ref()
    }

    /// The communicator for messages from one rank to another.
    ///
    /// # Panics
    /// When the plan that was opened has no such message: a bug of the plan.
    pub fn messages(&self, from: Rank, to: Rank) -> &dyn Communicator {
        self.messages.get(&(from, to)).unwrap_or_else(|| panic!("no communicator from {from} to {to}")).as_ref()
    }

    /// Fails when an operation failed after its call had returned.
    pub fn check(&self) -> Result<(), CommError> {
        self.by_lane.iter().try_for_each(|((_, lane), link)| {
            link.check(if *lane == Lane::Gather { "an all-gather" } else { "a reduction" })
        })?;
        self.messages.values().try_for_each(|link| link.check("a message between stages"))
    }

    /// Makes every wait of every member fail.
    pub fn abort(&self, reason: &str) {
        for link in self.by_lane.values().chain(self.messages.values()) {
            link.abort(reason);
        }
    }
}

/// Channel of the messages from one rank to another. Pairs that share a channel must not overlap. Pairs of stages `d` apart
/// that begin in the same stretch of `d` stages do not, nor do those of every other stretch: so each distance has two colours.
fn message_channel(mesh: Mesh, from: Rank, to: Rank) -> u32 {
    let (a, b) = (from.0 / mesh.dp, to.0 / mesh.dp);
    let distance = a.abs_diff(b);
    let colour = 2 * (distance - 1) + a.min(b) / distance % 2;
    MESSAGES + 2 * colour + u32::from(a < b)
}

/// Index in a communicator of messages: members are in the order of their ranks.
pub(crate) fn message_index(of: Rank, other: Rank) -> usize {
    usize::from(of > other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_that_share_a_channel_do_not_overlap() {
        let _limit = testkit::time_limit(10);
        for (dp, pp) in [(1, 2), (2, 2), (1, 8), (3, 4), (2, 15)] {
            let mesh = Mesh { dp, pp };
            let mut members: BTreeMap<u32, Vec<Rank>> = BTreeMap::new();
            for (a, b, replica) in (0..pp).flat_map(|a| (0..a).flat_map(move |b| (0..dp).map(move |r| (a, b, r)))) {
                let (low, high) = (Rank(b * dp + replica), Rank(a * dp + replica));
                for (from, to) in [(low, high), (high, low)] {
                    members.entry(message_channel(mesh, from, to)).or_default().extend([from, to]);
                }
            }
            for (channel, mut ranks) in members {
                let all = ranks.len();
                ranks.sort_unstable();
                ranks.dedup();
                assert_eq!(ranks.len(), all, "channel {channel} of {mesh:?}");
                assert!((MESSAGES..63).contains(&channel), "channel {channel} of {mesh:?}");
            }
        }
    }
}
