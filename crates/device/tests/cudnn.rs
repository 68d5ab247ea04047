//! Attention through cuDNN agrees with the backend's own kernels, and gives the same bits every run where it says so.

use gpurun_device::{
    Attention, AttentionBackward, AttentionShape, Backend, CudaBackend, CudnnAttention, DeviceError, ScratchSizes,
    cudnn_library,
};
use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

const LANE: Lane = Lane::Compute;

struct Case {
    backend: CudaBackend,
    arena: ArenaId,
    next: u64,
}

impl Case {
    fn room(&mut self, dtype: DType, len: usize) -> View {
        let view = View { arena: self.arena, offset: self.next, len, dtype };
        self.next = (self.next + view.bytes()).next_multiple_of(256);
        view
    }

    /// Roughly normal values of that type.
    fn random(&mut self, dtype: DType, len: usize) -> View {
        let (wide, view) = (self.room(DType::F32, len), self.room(dtype, len));
        let mut state = len as u32;
        let mut uniform = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let bytes: Vec<u8> = (0..len).flat_map(|_| (2.0 * (uniform() + uniform() + uniform())).to_le_bytes()).collect();
        self.backend.upload(&bytes, wide).expect("upload");
        self.backend.cast(LANE, wide, view).expect("cast");
        view
    }

    fn values(&mut self, view: View) -> Vec<f32> {
        let wide = self.room(DType::F32, view.len);
        self.backend.cast(LANE, view, wide).expect("cast");
        self.backend.synchronize(LANE).expect("the operations succeed");
        let mut bytes = vec![0; wide.bytes() as usize];
        self.backend.download(wide, &mut bytes).expect("download");
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    }

    /// Output, log-sums and gradients.
    fn run(&mut self, mode: CudnnAttention, args: &AttentionBackward) -> [Vec<f32>; 3] {
        self.backend.set_cudnn_attention(mode);
        for view in [args.forward.out, args.forward.lse, args.dqkv] {
            self.backend.fill(LANE, view, f32::NAN).expect("fill");
        }
        self.backend.attention_forward(LANE, args.forward).expect("attention_forward");
        self.backend.attention_backward(LANE, *args).expect("attention_backward");
        [args.forward.out, args.forward.lse, args.dqkv].map(|view| self.values(view))
    }
}

fn near(what: &str, got: &[f32], want: &[f32], tolerance: f64) {
    let size = want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt();
    let error = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum::<f64>().sqrt();
    assert!(error <= tolerance * size, "{what}: relative error {:e}", error / size);
}

#[test]
fn cudnn_agrees_with_our_own_kernels() {
    let _limit = testkit::time_limit(120);
    let backend = match CudaBackend::new(0, 2) {
        Ok(backend) => backend,
        Err(DeviceError::Missing(why)) if std::env::var_os("GPURUN_REQUIRE_GPU").is_none() => {
            eprintln!("skipped: no GPU ({why})");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let library = cudnn_library();
    if library.path.is_none() || library.error.is_some() {
        eprintln!("skipped: no cuDNN ({library:?})");
        return;
    }
    eprintln!("{library:?}");
    let arena = backend.allocate(Place::Device, Bytes(1 << 30)).expect("an arena");
    let mut case = Case { backend, arena, next: 0 };
    case.backend.whole_documents(true);
    let mut plans = 0;
    for dtype in [DType::Bf16, DType::F16] {
        for [batch, seq, heads, kv_heads, head_dim] in
            [[2, 256, 4, 4, 64], [2, 512, 8, 2, 64], [1, 1024, 4, 1, 128], [3, 320, 2, 2, 128]]
        {
            case.next = 0;
            let shape = AttentionShape { batch, seq, heads, kv_heads, head_dim };
            let rows = batch * seq;
            let starts = case.room(DType::I32, rows);
            case.backend.upload(&vec![0; 4 * rows], starts).expect("upload");
            let scratch = case.backend.attention_scratch(shape, dtype).0.div_ceil(4) as usize;
            let forward = Attention {
                qkv: case.random(dtype, rows * shape.packed_width()),
                starts,
                out: case.room(dtype, rows * heads * head_dim),
                lse: case.room(DType::F32, batch * heads * seq),
                scratch: case.room(DType::F32, scratch),
                shape,
                scale: (head_dim as f32).sqrt().recip(),
            };
            let args = AttentionBackward {
                forward,
                dout: case.random(dtype, forward.out.len),
                dqkv: case.room(dtype, forward.qkv.len),
            };
            let want = case.run(CudnnAttention::Off, &args);
            assert_eq!(case.backend.cudnn_plans(), plans, "switched off, cuDNN is not asked");
            let tolerance = if dtype == DType::Bf16 { 1e-2 } else { 2e-3 };
            for mode in [CudnnAttention::Deterministic, CudnnAttention::Fastest] {
                let got = case.run(mode, &args);
                eprintln!("{shape:?} {dtype} {mode:?}: {} plans are new", case.backend.cudnn_plans() - plans);
                plans = case.backend.cudnn_plans();
                for ((name, got), want) in ["out", "lse", "dqkv"].into_iter().zip(&got).zip(&want) {
                    near(&format!("{name} of {shape:?} {dtype} {mode:?}"), got, want, tolerance);
                }
                if mode == CudnnAttention::Deterministic {
                    assert!(case.run(mode, &args) == got, "{shape:?} {dtype} gives other bits in a second run");
                }
            }
        }
    }
    assert!(plans > 0, "cuDNN is there and takes none of these");
}
