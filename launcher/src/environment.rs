//! The variables that a worker is started with.

use std::ffi::OsString;
use std::net::TcpListener;

use anyhow::Context;
use gpurun_wire::{Address, Token};

use crate::machine;

/// What all workers of an attempt share.
pub struct Rendezvous {
    /// Where the store listens.
    pub address: Address,
    /// The job's secret.
    pub token: Token,
    /// `MASTER_ADDR`: for programs that bring their own rendezvous.
    pub master_addr: String,
    /// `MASTER_PORT`: free at the time of the start, unless chosen.
    pub master_port: String,
    /// Number of the inherited file descriptor of the ranks' shared memory, if there is one for so many ranks.
    pub shared_memory: Option<i32>,
    /// Number of the inherited file descriptor of the ranks' positions.
    pub positions: i32,
}

/// `MASTER_ADDR` and `MASTER_PORT`: as `PET_MASTER_ADDR` and `PET_MASTER_PORT` say, else loopback and a free port.
///
/// # Errors
/// When `PET_MASTER_PORT` is no port, or no port is free.
pub fn master() -> anyhow::Result<(String, String)> {
    let address = std::env::var("PET_MASTER_ADDR").unwrap_or_else(|_| "127.0.0.1".to_owned());
    if let Ok(port) = std::env::var("PET_MASTER_PORT")
        && port != "0"
    {
        let number = port.parse::<u16>();
        number.with_context(|| format!("PET_MASTER_PORT={port} is no port; give 1 to 65535, or unset it"))?;
        return Ok((address, port));
    }
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    Ok((address, free.context("no port is free on the loopback interface")?.port().to_string()))
}

/// A name that nobody can guess: 128 random bits in hexadecimal.
///
/// # Errors
/// When the system has no random numbers.
pub fn random_name() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    let mut source = std::fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?;
    std::io::Read::read_exact(&mut source, &mut bytes).context("cannot read /dev/urandom")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The variables of one worker.
pub fn of_worker(
    rank: u32,
    world: u32,
    attempt: u32,
    hang_timeout: f64,
    job: &Rendezvous,
) -> Vec<(&'static str, OsString)> {
    let mut variables: Vec<(&'static str, OsString)> = vec![
        ("RANK", rank.to_string().into()),
        ("LOCAL_RANK", rank.to_string().into()),
        ("WORLD_SIZE", world.to_string().into()),
        ("LOCAL_WORLD_SIZE", world.to_string().into()),
        ("GROUP_RANK", "0".into()),
        ("MASTER_ADDR", job.master_addr.clone().into()),
        ("MASTER_PORT", job.master_port.clone().into()),
        ("GPURUN_WORKER", "1".into()),
        ("GPURUN_STORE", job.address.to_string().into()),
        ("GPURUN_TOKEN", job.token.reveal().into()),
        ("GPURUN_POSITIONS_FD", job.positions.to_string().into()),
        ("GPURUN_LAUNCHER", std::process::id().to_string().into()),
        ("GPURUN_RESTART", attempt.to_string().into()),
        ("GPURUN_HANG_TIMEOUT", hang_timeout.to_string().into()),
    ];
    if let Some(number) = job.shared_memory {
        variables.push(("GPURUN_SHM_FD", number.to_string().into()));
    }
    if std::env::var_os("GPURUN_THREADS").is_none() {
        variables.push(("GPURUN_THREADS", machine::threads_per_worker(world).to_string().into()));
    }
    variables
}
