//! Rates of this machine, measured by all ranks at once before there is a plan.

use gpurun_device::{Backend, HostRates, host_rates};
use gpurun_engine::EngineError;
use gpurun_plan::Machine;
use gpurun_types::Bytes;

use crate::train::{RankPlace, TrainError};

/// Host memory that a measurement takes at most: more than caches hold.
const MOST: Bytes = Bytes(256 << 20);

/// `machine` with the rates of memory and link that the slowest rank measured, and words on them. All ranks get the same.
pub(crate) fn measured(
    machine: Machine,
    backend: &dyn Backend,
    place: &RankPlace<'_>,
    bytes: Bytes,
) -> Result<(Machine, String), TrainError> {
    // They share the host: they begin together.
    place.exchange("rates-begin", &[])?;
    let mine = host_rates(backend, bytes.min(MOST))
        .map_err(|source| EngineError::SetUp { what: "measuring memory and link for --offload-via auto", source })?;
    let all = place.exchange("rates", &encode(mine))?;
    let all = all.iter().map(|bytes| decode(bytes)).collect::<Option<Vec<_>>>();
    let slowest = all.and_then(|all| all.into_iter().reduce(HostRates::lowest));
    let rates =
        slowest.ok_or_else(|| TrainError::Board("a rank measured other things; are all the same gpurun?".into()))?;
    let gigabytes = |rate: f64| rate / 1e9;
    let who = if place.world == 1 { "measured" } else { "measured by the slowest rank, all at once" };
    let words = format!(
        "{who}, GB/s: link {:.1} to the device and {:.1} back at once, host memory {:.1}, Adam on the host {:.1}",
        gigabytes(rates.to_device),
        gigabytes(rates.to_host),
        gigabytes(rates.triad),
        gigabytes(rates.adam)
    );
    let HostRates { to_device, to_host, adam, .. } = rates;
    Ok((Machine { to_device, to_host, host_memory: adam, ..machine }, words))
}

fn encode(rates: HostRates) -> Vec<u8> {
    let HostRates { to_device, to_host, triad, adam } = rates;
    [to_device, to_host, triad, adam].map(f64::to_le_bytes).concat()
}

fn decode(bytes: &[u8]) -> Option<HostRates> {
    let (rates, []) = bytes.as_chunks::<8>() else { return None };
    let [to_device, to_host, triad, adam] = *<&[[u8; 8]; 4]>::try_from(rates).ok()?;
    let [to_device, to_host, triad, adam] = [to_device, to_host, triad, adam].map(f64::from_le_bytes);
    Some(HostRates { to_device, to_host, triad, adam })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_go_to_other_ranks_unchanged() {
        let _limit = testkit::time_limit(10);
        let rates = HostRates { to_device: 5.1e10, to_host: 4.9e10, triad: 9.6e10, adam: 1.0 / 3.0 };
        assert_eq!(decode(&encode(rates)), Some(rates));
        assert_eq!(decode(&encode(rates)[1..]), None);
        assert_eq!(decode(&[0; 40]), None);
    }
}
