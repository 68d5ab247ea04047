//! Model configurations: presets, files, and what is wrong with bad ones.
// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use gpurun_model::layers::Activations;
use gpurun_model::{Family, ModelConfig, ModelError, PRESETS, build};

#[test]
fn presets_have_the_published_sizes() {
    let _limit = testkit::time_limit(10);
    let parameters = |name: &str| ModelConfig::preset(name).unwrap().parameters();
    // Published counts with the vocabulary of 50257 padded to 50304.
    assert_eq!(parameters("gpt2-124m"), 124_439_808 + 47 * 768);
    assert_eq!(parameters("gpt2-355m"), 354_823_168 + 47 * 1024);
    assert_eq!(parameters("gpt2-774m"), 774_030_080 + 47 * 1280);
    assert_eq!(parameters("gpt2-1558m"), 1_557_611_200 + 47 * 1600);
    assert_eq!(parameters("llama-7b"), 6_738_415_616);
    assert_eq!(parameters("llama-1b") / 1_000_000, 1_104);
    assert_eq!(parameters("tiny"), 4 * (12 * 128 * 128 + 13 * 128) + 2 * 128 + (257 + 256) * 128);
}

#[test]
fn counts_and_flops_agree_with_the_units() {
    let _limit = testkit::time_limit(10);
    for name in PRESETS {
        let preset = ModelConfig::preset(name).unwrap();
        for (tied, qkv_bias) in [(true, true), (false, preset.family == Family::Gpt2)] {
            let config = ModelConfig { tied, qkv_bias, ..preset.clone() };
            let model = build(&config).unwrap();
            let elements: usize = model.params().iter().map(gpurun_model::Param::elements).sum();
            assert_eq!(config.parameters(), elements as u64, "{name}, tied {tied}");
            let flops = 3.0 * model.forward_flops_per_token(512);
            assert!((config.training_flops_per_token(512) / flops - 1.0).abs() < 1e-12, "{name}, tied {tied}");
        }
    }
}

#[test]
fn names_are_those_of_hugging_face() {
    let _limit = testkit::time_limit(10);
    let names = |config: &ModelConfig| build(config).unwrap().params().into_iter().map(|p| p.name).collect::<Vec<_>>();
    let gpt2 = names(&ModelConfig { layers: 1, ..ModelConfig::preset("tiny").unwrap() });
    let block = "ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias ln_2.weight \
                 ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias";
    let mut expected = vec!["transformer.wte.weight".to_owned(), "transformer.wpe.weight".to_owned()];
    expected.extend(block.split(' ').map(|part| format!("transformer.h.0.{part}")));
    expected.extend(["transformer.ln_f.weight".to_owned(), "transformer.ln_f.bias".to_owned()]);
    assert_eq!(gpt2, expected);

    let llama = ModelConfig { layers: 1, qkv_bias: true, ..ModelConfig::preset("llama-1b").unwrap() };
    let block = "input_layernorm.weight self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight \
                 self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias self_attn.o_proj.weight \
                 post_attention_layernorm.weight mlp.gate_proj.weight mlp.up_proj.weight mlp.down_proj.weight";
    let mut expected = vec!["model.embed_tokens.weight".to_owned()];
    expected.extend(block.split(' ').map(|part| format!("model.layers.0.{part}")));
    expected.extend(["model.norm.weight".to_owned(), "lm_head.weight".to_owned()]);
    assert_eq!(names(&llama), expected);
}

#[test]
fn decay_is_for_matrices_only() {
    let _limit = testkit::time_limit(10);
    for name in PRESETS {
        for param in build(&ModelConfig::preset(name).unwrap()).unwrap().params() {
            assert_eq!(param.decay, param.shape.len() == 2, "{}", param.name);
        }
    }
}

#[test]
fn an_unknown_preset_is_answered_with_the_nearest() {
    let _limit = testkit::time_limit(10);
    let message = |name: &str| ModelConfig::preset(name).unwrap_err().to_string();
    assert!(message("gpt2-125m").contains("did you mean \"gpt2-124m\"?"), "{}", message("gpt2-125m"));
    assert!(message("LLAMA-7B").contains("did you mean \"llama-7b\"?"));
    assert!(
        message("resnet")
            .ends_with("the presets are tiny, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, llama-1b, llama-7b")
    );
    assert!(!message("resnet").contains("did you mean"));
}

const TOML: &str = "family = \"llama\"\nlayers = 2\nwidth = 64\nheads = 4\nff = 96\nvocabulary = 61\ncontext = 32\n";

#[test]
fn absent_fields_take_the_usual_values_of_the_family() {
    let _limit = testkit::time_limit(10);
    let llama: ModelConfig = toml::from_str(TOML).unwrap();
    assert_eq!((llama.kv_heads, llama.head_dim, llama.tied, llama.qkv_bias), (4, 16, false, false));
    let gpt2: ModelConfig = toml::from_str(&TOML.replace("llama", "gpt2").replace("ff = 96\n", "")).unwrap();
    assert_eq!((gpt2.ff, gpt2.tied, gpt2.qkv_bias), (256, true, true));
    let again: ModelConfig = toml::from_str(&toml::to_string(&gpt2).unwrap()).unwrap();
    assert_eq!(again, gpt2);
}

#[test]
fn bad_fields_are_refused_by_name_with_a_remedy() {
    let _limit = testkit::time_limit(10);
    let message = |from: &str, to: &str| {
        assert!(TOML.contains(from));
        toml::from_str::<ModelConfig>(&TOML.replace(from, to)).unwrap_err().to_string()
    };
    for (from, to, says) in [
        ("heads = 4", "heads = 5", "heads = 5 does not divide width = 64; choose"),
        ("heads = 4", "heads = 0", "heads = 0 does not divide"),
        ("heads = 4", "heads = 4\nkv_heads = 3", "kv_heads = 3 does not divide heads = 4; choose"),
        ("layers = 2\n", "", "layers is missing; give it, or start from a preset"),
        ("layers = 2", "layers = 0", "layers = 0 is out of range"),
        ("layers = 2", "layer = 2", "unknown field `layer`"),
        ("ff = 96", "ff = 90", "ff = 90 is no multiple of 8; round it up"),
        ("ff = 96\n", "", "ff is missing"),
        ("heads = 4", "heads = 32\nhead_dim = 3", "head_dim = 3 is odd"),
        ("heads = 4", "heads = 2\nhead_dim = 2", "head_dim = 2 times kv_heads = 2 is no multiple of 8"),
        ("family = \"llama\"", "family = \"gpt2\"\nqkv_bias = false", "qkv_bias = false is not GPT-2"),
        ("family = \"llama\"", "family = \"gpt2\"\nkv_heads = 2", "kv_heads = 2 differs from heads = 4"),
        ("family = \"llama\"", "family = \"llama\"\neps = 0.0", "eps = 0 is no positive number"),
        ("family = \"llama\"", "family = \"llama\"\ntheta = nan", "theta = NaN is no number above 1"),
        ("vocabulary = 61", "vocabulary = 5000000000", "vocabulary = 5000000000 is out of range"),
    ] {
        let message = message(from, to);
        assert!(message.contains(says), "{to:?}: {message}");
    }
    let odd = ModelConfig { ff: 90, ..toml::from_str(TOML).unwrap() };
    assert!(matches!(odd.build(), Err(ModelError::Field { field: "ff", .. })), "build validates too");
}

#[test]
fn lean_blocks_save_less_than_others() {
    let _limit = testkit::time_limit(10);
    let shape = gpurun_model::BatchShape { batch: 1, seq: 16 };
    let per_token = |config: &ModelConfig, activations| {
        let model = config.build_with(activations).unwrap();
        let saved = model.units[1].saved(shape, gpurun_types::DType::Bf16);
        saved.iter().filter(|t| t.dtype == gpurun_types::DType::Bf16).map(|t| t.elements).sum::<usize>() / 16
    };
    let gpt2 = ModelConfig::preset("gpt2-124m").unwrap();
    assert_eq!(per_token(&gpt2, Activations::Lean), 9 * 768, "qkv 3, attention 1, middle 1, before gelu 4");
    assert_eq!(per_token(&gpt2, Activations::Kept), 15 * 768);
    let llama = ModelConfig::preset("llama-1b").unwrap();
    assert_eq!(per_token(&llama, Activations::Lean), (2048 + 1024) + 2048 + 2048 + 2 * 8192);
}

#[test]
fn blocks_restore_the_inside_of_their_feed_forward_part() {
    let _limit = testkit::time_limit(10);
    let shape = gpurun_model::BatchShape { batch: 1, seq: 1024 };
    for (preset, width, up) in [("gpt2-124m", 768, 4 * 768), ("llama-1b", 2048, 2 * 8192)] {
        let model = ModelConfig::preset(preset).unwrap().build().unwrap();
        let (block, ends) = (&model.units[1], [&model.units[0], model.units.last().unwrap()]);
        let saved = block.saved(shape, gpurun_types::DType::Bf16);
        let restored: usize = block.restorable().iter().map(|at| saved[*at].elements).sum();
        assert_eq!(restored, 1024 * up, "{preset}");
        // One product of the block's six (seven) runs again, and nothing of attention.
        assert_eq!(block.restore_flops_per_token(1024), 2.0 * (width * up) as f64, "{preset}");
        assert!(block.restore_flops_per_token(1024) < 0.6 * block.forward_flops_per_token(1024), "{preset}");
        assert!(ends.iter().all(|unit| unit.restorable().is_empty()), "{preset}");
    }
}
