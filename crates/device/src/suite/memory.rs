//! Arenas, fill, copy, cast.

use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};
use half::{bf16, f16};

use super::{Cx, encoded};

const TYPES: [DType; 5] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::F64];

/// New arenas are zeroed, counted and apart; bytes go up and down unchanged.
pub fn arenas(cx: &Cx<'_>) {
    for place in [Place::Device, Place::Host] {
        let before = cx.backend.allocated(place).0;
        for bytes in [1 << 10, (4 << 20) + 512] {
            let arena = cx.backend.allocate(place, Bytes(bytes)).expect("allocate");
            let view = View { arena, offset: 0, len: bytes as usize / 2, dtype: DType::F16 };
            let mut down = vec![1; bytes as usize];
            cx.backend.download(view, &mut down).expect("download");
            assert!(down.iter().all(|b| *b == 0), "a new arena at {place} is not zeroed");
            let up: Vec<u8> = (0..bytes).map(|i| (i * 7 % 251) as u8).collect();
            cx.backend.upload(&up, view).expect("upload");
            cx.backend.download(view, &mut down).expect("download");
            assert!(up == down, "bytes changed on the way to {place} and back");
        }
        let with = cx.backend.allocated(place).0;
        assert!(with >= before + (4 << 20), "arenas at {place} are not counted");
        // One that is given back is not there any more, and its number is not used again.
        let arena = cx.backend.allocate(place, Bytes(1 << 20)).expect("allocate");
        let view = View { arena, offset: 0, len: 16, dtype: DType::F32 };
        cx.backend.fill(if place == Place::Host { Lane::Host } else { Lane::Compute }, view, 1.0).expect("fill");
        cx.backend.release(arena).expect("release");
        assert_eq!(cx.backend.allocated(place).0, with, "released memory at {place} is still counted");
        assert!(cx.backend.upload(&[0; 64], view).is_err(), "a view of released memory at {place}");
        assert_ne!(cx.backend.allocate(place, Bytes(64)).expect("allocate"), arena);
    }
    assert!(cx.backend.release(ArenaId(u32::MAX)).is_err(), "there is no such arena");
    let refused = cx.backend.allocate(Place::Device, Bytes(1 << 60));
    assert!(matches!(refused, Err(crate::DeviceError::OutOfMemory { .. })), "{refused:?}");
}

/// Every type, on device and host arenas.
pub fn fill(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("allocate");
    for (room, lane) in [(cx.room(), Lane::Compute), (cx.room_in(host), Lane::Host)] {
        for dtype in TYPES {
            for (len, value) in [(1, 1.5_f32), (257, -3.0), (70_001, 0.0)] {
                let view = room.blank_as(dtype, len);
                cx.backend.fill(lane, view, value).expect("fill");
                let value = if dtype == DType::I32 { value.trunc() } else { value };
                assert!(room.get(view).iter().all(|v| *v == f64::from(value)), "fill {dtype} with {value}");
            }
        }
    }
}

/// Between and within device and host arenas.
pub fn copy(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("allocate");
    let (device, host) = (cx.room(), cx.room_in(host));
    for (from, to, lane) in [
        (&device, &device, Lane::Compute),
        (&device, &host, Lane::CopyOut),
        (&host, &device, Lane::CopyIn),
        (&host, &host, Lane::CopyIn),
    ] {
        for dtype in TYPES {
            for len in [1, 33, 70_001] {
                let src = from.blank_as(dtype, len);
                let bytes: Vec<u8> = (0..src.bytes()).map(|i| (i * 13 % 253) as u8).collect();
                cx.backend.upload(&bytes, src).expect("upload");
                let dst = to.blank_as(dtype, len);
                cx.backend.copy(lane, src, dst).expect("copy");
                assert!(to.get_bytes(dst) == bytes, "copy of {len} {dtype}");
            }
        }
    }
}

/// Every pair of floating types, bit for bit.
pub fn cast(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("allocate");
    let mut values: Vec<f32> = (0..70_000)
        .map(|_| {
            let wide = f32::from_bits((cx.uniform() * f64::from(u32::MAX)) as u32);
            // Half of them in the range where fp16 has normal and subnormal numbers.
            let narrow = f32::from_bits(0x3200_0000 + (cx.uniform() * f64::from(0x1600_0000)) as u32);
            if cx.below(2) == 0 { wide } else { narrow }
        })
        .collect();
    values.extend([
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        65_519.0,
        65_520.0,
    ]);
    // Ties between neighbours in bf16 and in fp16.
    let step = |bits| 0.5_f32.powi(bits);
    values.extend([1.0 + step(8), 1.0 + 3.0 * step(8), 1.0 + step(11), 1.0 + 3.0 * step(11), step(25)]);
    let values: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
    for (room, lane) in [(cx.room(), Lane::Compute), (cx.room_in(host), Lane::Host)] {
        for from in [DType::F32, DType::Bf16, DType::F16] {
            let src = room.put_as(from, &values);
            let exact = super::rounded(&values, from);
            for to in [DType::F32, DType::Bf16, DType::F16] {
                let dst = room.blank_as(to, values.len());
                cx.backend.cast(lane, src, dst).expect("cast");
                let (got, want) = (room.get(dst), super::decoded(&encoded(&exact, to), to));
                for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                    let same = g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
                    assert!(same, "cast {from} to {to}: {} became {g}, wanted {w}", exact[i]);
                }
            }
        }
    }
    assert_eq!(bf16::from_f32(1.0 + step(8)).to_bits(), 0x3f80, "ties go to even");
    assert_eq!(f16::from_f32(65_520.0), f16::INFINITY);
}

/// With both kinds of stores, at lengths and places that are no multiples of a vector.
pub fn triad(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("allocate");
    let room = cx.room_in(host);
    for len in [1, 3, 257, 70_001] {
        let values: Vec<f64> = (0..len).map(|_| cx.uniform() - 0.5).collect();
        let a = room.put_as(DType::F32, &values);
        let b = room.put_as(DType::F32, &values[..len].iter().rev().copied().collect::<Vec<_>>());
        let (left, right) = (room.get(a), room.get(b));
        for past_caches in [false, true] {
            let dst = room.blank_as(DType::F32, len);
            cx.backend.triad(dst, a, b, past_caches).expect("triad");
            let want: Vec<f64> = left.iter().zip(&right).map(|(a, b)| f64::from(*a as f32 + 3.0 * *b as f32)).collect();
            assert_eq!(room.get(dst), want, "triad of {len}, past caches: {past_caches}");
        }
    }
}
