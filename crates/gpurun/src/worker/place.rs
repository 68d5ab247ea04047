//! Which rank this process is, as launchers and job managers say in the environment.

use gpurun_wire::{Address, AddressError, Token};

/// Who started this process, and how its ranks find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Starter {
    /// The `gpurun` launcher, which serves the store.
    Launcher {
        /// Where the store is.
        store: Address,
        /// The job's secret.
        token: Token,
    },
    /// A job manager. Rank 0 serves the store.
    JobManager {
        /// Its name, for messages.
        name: &'static str,
        /// Where rank 0 serves.
        store: Address,
        /// What ranks show each other.
        token: Token,
    },
    /// Nobody: a single rank.
    Nobody,
}

/// The place of this process among the ranks of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of this rank, `0..world`.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Index among the ranks of this machine.
    pub local_rank: u32,
    /// Ranks of this machine.
    pub local_world: u32,
    /// Who started it.
    pub starter: Starter,
}

/// What is wrong with the environment.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// A variable that is needed is missing.
    #[error("{present} is set, but {missing} is not: set both, or neither")]
    Missing {
        /// The variable that is there.
        present: &'static str,
        /// The one that should be.
        missing: &'static str,
    },
    /// A variable that should be a number is none.
    #[error("{name}={value}: not a whole number")]
    Number {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
    },
    /// Ranks that cannot be.
    #[error("{name}={rank} is not below the number of ranks, {world}")]
    Range {
        /// The variable.
        name: &'static str,
        /// The rank.
        rank: u32,
        /// The number of ranks.
        world: u32,
    },
    /// The store's address is none.
    #[error("GPURUN_STORE: {0}")]
    Store(String),
    /// A store that other machines reach needs a secret.
    #[error(
        "MASTER_ADDR={0} is not this machine's loopback interface, where anybody on the network could join: set \
         GPURUN_TOKEN to one secret on all ranks (or LOCAL_WORLD_SIZE equal to WORLD_SIZE when all ranks run here)"
    )]
    Open(String),
}

impl From<AddressError> for PlaceError {
    fn from(error: AddressError) -> Self {
        Self::Store(error.to_string())
    }
}

/// Looks a variable up.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Names under which a job manager says who is who.
struct Names {
    manager: &'static str,
    rank: &'static str,
    /// The first that is set counts.
    world: &'static [&'static str],
    local_rank: &'static str,
    local_world: Option<&'static str>,
    /// Variables whose values together name the job on this machine.
    job: &'static [&'static str],
}

/// In the order in which they are looked for. `RANK` and `WORLD_SIZE` go first: who sets them (a Kubernetes training
/// job, torchrun, a script within a Slurm allocation) is nearer to this process than the batch system around it.
const MANAGERS: &[Names] = &[
    Names {
        manager: "RANK and WORLD_SIZE",
        rank: "RANK",
        world: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_world: Some("LOCAL_WORLD_SIZE"),
        job: &["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"],
    },
    Names {
        manager: "Slurm",
        rank: "SLURM_PROCID",
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        local_world: None,
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
    },
    Names {
        manager: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"],
    },
];

impl Place {
    /// From this process's environment.
    ///
    /// # Errors
    /// When the variables contradict each other.
    pub fn from_env() -> Result<Self, PlaceError> {
        Self::find(&|name| std::env::var(name).ok())
    }

    /// From any environment.
    ///
    /// # Errors
    /// As [`Place::from_env`].
    pub fn find(env: Lookup<'_>) -> Result<Self, PlaceError> {
        if let Some(store) = env("GPURUN_STORE") {
            let token = need(env, "GPURUN_STORE", "GPURUN_TOKEN")?;
            let starter = Starter::Launcher { store: store.parse()?, token: Token::new(token) };
            need(env, "GPURUN_STORE", "RANK")?;
            return Self::read(env, &MANAGERS[0], starter);
        }
        for names in MANAGERS {
            if env(names.rank).is_none() && (names.rank != "RANK" || env("WORLD_SIZE").is_none()) {
                continue;
            }
            let mut place = Self::read(env, names, Starter::Nobody)?;
            if place.world > 1 {
                place.starter = place.rendezvous(env, names)?;
            }
            return Ok(place);
        }
        Ok(Self { rank: 0, world: 1, local_rank: 0, local_world: 1, starter: Starter::Nobody })
    }

    fn read(env: Lookup<'_>, names: &Names, starter: Starter) -> Result<Self, PlaceError> {
        let world_name = names.world.iter().find(|name| env(name).is_some()).unwrap_or(&names.world[0]);
        let rank = number(env, world_name, names.rank)?;
        let world = number(env, names.rank, world_name)?;
        if rank >= world {
            return Err(PlaceError::Range { name: names.rank, rank, world });
        }
        let optional = |name: &'static str, default: u32| match env(name) {
            Some(_) => number(env, name, name),
            None => Ok(default),
        };
        let local_world = names.local_world.map_or(Ok(world), |name| optional(name, world))?;
        let local_rank = optional(names.local_rank, rank)?;
        Ok(Self { rank, world, local_rank, local_world, starter })
    }

    /// Where rank 0 serves when there is no launcher: at `MASTER_ADDR` and `MASTER_PORT` if they are set, else at a Unix
    /// socket that the job's number names.
    ///
    /// Without `GPURUN_TOKEN` the token is only the job's name: it keeps jobs apart, and is no secret. That is allowed on
    /// the loopback interface and on the Unix socket (whose callers' user is checked), nowhere else.
    fn rendezvous(&self, env: Lookup<'_>, names: &Names) -> Result<Starter, PlaceError> {
        let parts: Vec<String> = names.job.iter().filter_map(|name| env(name)).collect();
        let job = parts.join(".");
        let secret = env("GPURUN_TOKEN");
        let here = self.local_world == self.world && env(names.local_world.unwrap_or(names.local_rank)).is_some();
        let store = match env("MASTER_ADDR") {
            Some(host) => {
                let port = need(env, "MASTER_ADDR", "MASTER_PORT")?;
                let loopback = matches!(host.as_str(), "localhost" | "127.0.0.1" | "::1");
                if !loopback && !here && secret.is_none() {
                    return Err(PlaceError::Open(host));
                }
                let host = if here || loopback { "127.0.0.1".to_owned() } else { host };
                format!("tcp:{}:{port}", if host.contains(':') { format!("[{host}]") } else { host }).parse()?
            }
            None if job.is_empty() => return Err(PlaceError::Missing { present: names.rank, missing: "MASTER_ADDR" }),
            None => Address::Abstract(format!("gpurun-{}-{job}", names.rank)),
        };
        let token = secret.unwrap_or_else(|| format!("{job}/{store}/{}", self.world));
        Ok(Starter::JobManager { name: names.manager, store, token: Token::new(token) })
    }
}

fn need(env: Lookup<'_>, present: &'static str, name: &'static str) -> Result<String, PlaceError> {
    env(name).ok_or(PlaceError::Missing { present, missing: name })
}

fn number(env: Lookup<'_>, present: &'static str, name: &'static str) -> Result<u32, PlaceError> {
    let value = need(env, present, name)?;
    value.parse().map_err(|_| PlaceError::Number { name, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(pairs: &[(&str, &str)]) -> Result<Place, PlaceError> {
        Place::find(&|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    fn store(place: &Place) -> String {
        match &place.starter {
            Starter::Launcher { store, .. } | Starter::JobManager { store, .. } => store.to_string(),
            Starter::Nobody => "nobody".to_owned(),
        }
    }

    #[test]
    fn alone_without_variables() {
        let _limit = testkit::time_limit(10);
        let place = find(&[]).unwrap();
        assert_eq!((place.rank, place.world, store(&place)), (0, 1, "nobody".to_owned()));
        assert_eq!(find(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().starter, Starter::Nobody);
    }

    #[test]
    fn the_launcher_goes_before_the_batch_system() {
        let _limit = testkit::time_limit(10);
        let place = find(&[
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "8"),
            ("GPURUN_STORE", "unix:@x"),
            ("GPURUN_TOKEN", "t"),
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
        ])
        .unwrap();
        assert_eq!((place.rank, place.world, place.local_rank, store(&place)), (1, 2, 1, "unix:@x".to_owned()));
    }

    #[test]
    fn job_managers() {
        let _limit = testkit::time_limit(10);
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
        ];
        let place = find(&slurm).unwrap();
        assert_eq!((place.rank, place.world, place.local_rank), (3, 4, 3));
        assert_eq!(store(&place), "unix:@gpurun-SLURM_PROCID-77.0");

        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "ns-1"),
        ];
        let place = find(&mpi).unwrap();
        assert_eq!(
            (place.rank, place.world, store(&place)),
            (1, 2, "unix:@gpurun-OMPI_COMM_WORLD_RANK-ns-1".to_owned())
        );

        let kubernetes = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "23456")];
        assert_eq!(store(&find(&kubernetes).unwrap()), "tcp:127.0.0.1:23456");
    }

    #[test]
    fn a_store_on_the_network_needs_a_secret() {
        let _limit = testkit::time_limit(10);
        let open = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "job-0"), ("MASTER_PORT", "1")];
        assert_eq!(find(&open), Err(PlaceError::Open("job-0".to_owned())));
        let with = |more: (&'static str, &'static str)| {
            let mut pairs = open.to_vec();
            pairs.push(more);
            find(&pairs).map(|place| store(&place))
        };
        assert_eq!(with(("GPURUN_TOKEN", "secret")).unwrap(), "tcp:job-0:1");
        assert_eq!(with(("LOCAL_WORLD_SIZE", "2")).unwrap(), "tcp:127.0.0.1:1");
    }

    #[test]
    fn contradictions_are_named() {
        let _limit = testkit::time_limit(10);
        for (pairs, said) in [
            (&[("RANK", "1")][..], "WORLD_SIZE is not"),
            (&[("WORLD_SIZE", "2")], "RANK is not"),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "not below"),
            (&[("RANK", "one"), ("WORLD_SIZE", "2")], "RANK=one"),
            (&[("RANK", "1"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not"),
            (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")], "MASTER_PORT is not"),
            (&[("GPURUN_STORE", "x"), ("GPURUN_TOKEN", "t"), ("RANK", "0"), ("WORLD_SIZE", "1")], "no address"),
            (&[("GPURUN_STORE", "unix:@x")], "GPURUN_TOKEN is not"),
        ] {
            let error = find(pairs).unwrap_err().to_string();
            assert!(error.contains(said), "{pairs:?}: {error}");
        }
    }
}
