//! Highest rates of matrix products by device name, as NVIDIA states them: what model FLOPs are divided by for MFU.

use gpurun_types::DType;

/// One kind of card.
struct Card {
    /// Names that the driver gives it.
    names: &'static [&'static str],
    /// TFLOP/s of matrix products in bf16 or fp16 with fp32 accumulation, without sparsity.
    half: f64,
    /// TFLOP/s in fp32 without tensor cores, which is how fp32 matrix products are computed here.
    single: f64,
    /// Where the figures are from.
    source: &'static str,
}

/// Only whole names count: other memory, another clock or a part of a card (MIG) is another rate.
///
/// Sheets that give rates with 2:4 sparsity alone are halved. Consumer cards accumulate in fp32 at half of the rate that
/// they are sold by.
const CARDS: &[Card] = &[
    card(&["NVIDIA B200"], 2250.0, 75.0, "HGX B200 data sheet"),
    card(
        &["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA GH200 480GB"],
        989.4,
        66.9,
        "H100 Tensor Core GPU Architecture, table 2 (H100 SXM5); H200 data sheet",
    ),
    card(&["NVIDIA H200 NVL", "NVIDIA H100 NVL"], 835.5, 60.0, "H200 NVL and H100 NVL data sheets"),
    card(&["NVIDIA H100 PCIe"], 756.0, 51.2, "H100 Tensor Core GPU Architecture, table 2 (H100 PCIe)"),
    card(
        &[
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
            "NVIDIA A800-SXM4-80GB",
            "NVIDIA A800 80GB PCIe",
        ],
        312.0,
        19.5,
        "A100 data sheet",
    ),
    card(&["NVIDIA A30"], 165.0, 10.3, "A30 data sheet"),
    card(&["NVIDIA A40"], 149.7, 37.4, "A40 data sheet"),
    card(&["NVIDIA A10"], 125.0, 31.2, "A10 data sheet"),
    card(&["NVIDIA RTX A6000"], 154.8, 38.7, "GA102 GPU Architecture, table 3 (RTX A6000)"),
    card(&["NVIDIA L40S"], 362.05, 91.6, "L40S data sheet"),
    card(&["NVIDIA L40"], 181.05, 90.5, "L40 data sheet"),
    card(&["NVIDIA L4"], 121.0, 30.3, "L4 data sheet"),
    card(&["NVIDIA RTX 6000 Ada Generation"], 364.2, 91.1, "RTX 6000 Ada data sheet"),
    card(&["NVIDIA GeForce RTX 5090"], 209.5, 104.8, "RTX Blackwell GPU Architecture, appendix A"),
    card(&["NVIDIA GeForce RTX 4090"], 165.2, 82.6, "Ada GPU Architecture, appendix A"),
    card(&["NVIDIA GeForce RTX 4080"], 97.5, 48.7, "Ada GPU Architecture, appendix A"),
    card(&["NVIDIA GeForce RTX 3090 Ti"], 80.0, 40.0, "GA102 GPU Architecture, appendix A"),
    card(&["NVIDIA GeForce RTX 3090"], 71.0, 35.6, "GA102 GPU Architecture, appendix A"),
];

const fn card(names: &'static [&'static str], half: f64, single: f64, source: &'static str) -> Card {
    Card { names, half, single, source }
}

/// The highest rate of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// FLOP/s of matrix products of the type that was asked for.
    pub flops: f64,
    /// Where the figure is from.
    pub source: &'static str,
}

/// The highest rate of matrix products of `dtype` on the device that is called `name`; `None` where nobody has stated one.
#[must_use]
pub fn peak(name: &str, dtype: DType) -> Option<Peak> {
    let card = CARDS.iter().find(|card| card.names.contains(&name))?;
    let tera = match dtype {
        DType::Bf16 | DType::F16 => card.half,
        DType::F32 => card.single,
        DType::I32 | DType::F64 => return None,
    };
    Some(Peak { flops: tera * 1e12, source: card.source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_known_by_its_whole_name() {
        let _limit = testkit::time_limit(10);
        let half = |name| peak(name, DType::Bf16).map(|p| p.flops.round());
        assert_eq!(half("NVIDIA H200"), Some(989.4e12));
        assert_eq!(half("NVIDIA A100-SXM4-80GB"), Some(312e12));
        assert_eq!(peak("NVIDIA H200", DType::F32).map(|p| p.flops.round()), Some(66.9e12));
        for other in [
            "cpu (2 threads)",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA H20",
            "",
        ] {
            assert_eq!(peak(other, DType::Bf16), None, "{other}");
        }
        assert_eq!(peak("NVIDIA H200", DType::F64), None);
    }

    #[test]
    fn no_name_stands_twice_and_tensor_cores_are_the_faster() {
        let _limit = testkit::time_limit(10);
        let mut names: Vec<&str> = CARDS.iter().flat_map(|card| card.names).copied().collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(CARDS.iter().all(|card| card.half > card.single && !card.source.is_empty()));
    }
}
