//! The communicators of one rank, by group and lane.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpurun_comm::{CommError, Communicator};
use gpurun_plan::{Group, Mesh};
use gpurun_types::{Lane, Rank};

/// Makes communicators. Every rank asks for the same ones in the same order.
pub trait Network: Send + Sync {
    /// A communicator of `members` (this rank among them) on its own channel.
    fn communicator(&self, channel: u32, members: &[Rank]) -> Result<Arc<dyn Communicator>, CommError>;
}

/// The communicators that a plan can name.
pub struct Links {
    by_lane: BTreeMap<(Group, Lane), Arc<dyn Communicator>>,
    peers: Option<Arc<dyn Communicator>>,
}

impl Links {
    /// Opens what the plan of `rank` needs: collectives of the data-parallel group and of the world on each lane that has
    /// them, and one communicator for messages between stages.
    pub fn open(network: &dyn Network, mesh: Mesh, rank: Rank) -> Result<Self, CommError> {
        let world: Vec<Rank> = (0..mesh.dp * mesh.pp).map(Rank).collect();
        let first = rank.0 / mesh.dp * mesh.dp;
        let data: Vec<Rank> = (first..first + mesh.dp).map(Rank).collect();
        let mut by_lane = BTreeMap::new();
        let mut channel = 0;
        for (group, members) in [(Group::Data, &data), (Group::World, &world)] {
            for lane in [Lane::Gather, Lane::Reduce] {
                if members.len() > 1 {
                    // Groups of one kind do not overlap, so they may share a channel number.
                    by_lane.insert((group, lane), network.communicator(channel, members)?);
                }
                channel += 1;
            }
        }
        let peers = if mesh.pp > 1 { Some(network.communicator(channel, &world)?) } else { None };
        Ok(Self { by_lane, peers })
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

    /// The communicator for messages between stages; a peer's index is its rank.
    ///
    /// # Panics
    /// When the plan has one stage and sends all the same: a bug of the plan.
    pub fn peers(&self) -> &dyn Communicator {
        self.peers.as_deref().expect("a plan with one stage has no sends or receives")
    }

    /// Makes every wait of every member fail.
    pub fn abort(&self, reason: &str) {
        for link in self.by_lane.values().chain(&self.peers) {
            link.abort(reason);
        }
    }
}
