//! What the device of the slowest rank reaches, measured by all at once.

use gpurun_device::{DeviceRates, device_rates};
use gpurun_engine::EngineError;
use gpurun_plan::Machine;

use crate::devices::Devices;
use crate::options::TrainOptions;
use crate::train::{RankPlace, TrainError};

/// The rates of this kind of machine, with those of matrix products and memory as they are here and now. All ranks get the same.
pub(super) fn measured(
    devices: &Devices<'_>,
    options: &TrainOptions,
    place: &RankPlace<'_>,
) -> Result<Machine, TrainError> {
    // Ranks that share a processor begin together.
    place.exchange("device-rates-begin", &[])?;
    let mine = device_rates(devices.backend.as_ref(), options.dtype)
        .map_err(|source| EngineError::SetUp { what: "measuring the device", source })?;
    let all = place.exchange("device-rates", &encode(mine))?;
    let all = all.iter().map(|bytes| decode(bytes)).collect::<Option<Vec<_>>>();
    let rates = all.and_then(|all| all.into_iter().reduce(DeviceRates::lowest));
    let DeviceRates { matmul, memory } =
        rates.ok_or_else(|| TrainError::Board("a rank measured other things; are all the same gpurun?".into()))?;
    let table = devices.machine(options, place.world);
    Ok(Machine {
        source: format!("matrix products and device memory measured now; the rest: {}", table.source),
        half_flops: matmul,
        single_flops: matmul,
        memory,
        ..table
    })
}

fn encode(rates: DeviceRates) -> Vec<u8> {
    [rates.matmul, rates.memory].map(f64::to_le_bytes).concat()
}

fn decode(bytes: &[u8]) -> Option<DeviceRates> {
    let (rates, []) = bytes.as_chunks::<8>() else { return None };
    let [matmul, memory] = *<&[[u8; 8]; 2]>::try_from(rates).ok()?;
    Some(DeviceRates { matmul: f64::from_le_bytes(matmul), memory: f64::from_le_bytes(memory) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_go_to_other_ranks_unchanged() {
        let _limit = testkit::time_limit(10);
        let rates = DeviceRates { matmul: 7.9e14, memory: 1.0 / 3.0 };
        assert_eq!(decode(&encode(rates)), Some(rates));
        assert_eq!(decode(&encode(rates)[1..]), None);
        assert_eq!(decode(&[0; 24]), None);
    }
}
