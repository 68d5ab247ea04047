//! Paths, formats, tokenizers, packing, caching; and every way that data can be wrong.

use std::fs;
use std::path::PathBuf;

use gpurun_data::{DataConfig, DataError, Dataset, Tokenizer, TokenizerChoice, write_bin};
use proptest::prelude::*;
use tempfile::TempDir;

struct Room(TempDir);

impl Room {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, contents).expect("a file");
        path
    }

    fn config(&self, paths: &[PathBuf]) -> DataConfig {
        DataConfig {
            paths: paths.to_vec(),
            eval_paths: vec![],
            tokenizer: TokenizerChoice::Bytes,
            seq_len: 4,
            seed: 5,
            held_out: 0.0,
            vocabulary: 257,
            cache_dir: Some(self.0.path().join(".cache")),
            embedded: None,
        }
    }
}

fn open(config: &DataConfig) -> Result<Dataset, DataError> {
    Dataset::open(config, &mut |_| ())
}

fn refused(config: &DataConfig) -> String {
    open(config).err().expect("refused").to_string()
}

fn sample(data: &Dataset, n: usize, i: u64) -> [Vec<i32>; 3] {
    let [mut t, mut y, mut s] = [vec![0; n], vec![0; n], vec![0; n]];
    data.fill(i, &mut t, &mut y, &mut s);
    [t, y, s]
}

/// All windows of an epoch, in the order of the data.
fn windows(data: &Dataset, n: usize) -> Vec<[Vec<i32>; 3]> {
    let mut all: Vec<_> = (0..data.windows()).map(|i| sample(data, n, i)).collect();
    all.sort();
    all
}

#[test]
fn documents_are_packed_behind_end_of_text() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let (a, b) = (room.file("a.txt", "ab"), room.file("b.txt", "cdef"));
    let data = open(&room.config(&[a, b])).expect("data");
    // Stream: E a b E c d e f, so one window of 4 and its next token; the rest is no whole window.
    assert_eq!((data.tokens(), data.windows()), (8, 1));
    let [t, y, s] = sample(&data, 4, 0);
    assert_eq!(t, [256, 97, 98, 256]);
    assert_eq!(y, [97, 98, 256, 99]);
    assert_eq!(s, [0, 0, 0, 3]);
}

#[test]
fn folders_are_read_by_name_without_hidden_files() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    room.file("d/b.txt", "2222");
    room.file("d/a/z.md", "1111");
    room.file("d/.hidden", "xxxx");
    room.file("d/.git/config", "xxxx");
    room.file("d/picture.png", "xxxx");
    room.file("d/empty.txt", "");
    let data = open(&DataConfig { seq_len: 9, ..room.config(&[room.0.path().join("d")]) }).expect("data");
    let [t, ..] = sample(&data, 9, 0);
    assert_eq!(t, [256, 49, 49, 49, 49, 256, 50, 50, 50]);
}

#[test]
fn json_lines_are_documents() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let file = room.file("x.jsonl", "{\"text\": \"ab\", \"id\": 1}\n\n{\"text\": \"\"}\n{\"text\": \"\u{e9}!\"}");
    let data = open(&DataConfig { seq_len: 6, ..room.config(&[file]) }).expect("data");
    let [t, _, s] = sample(&data, 6, 0);
    assert_eq!(t, [256, 97, 98, 256, 0xc3, 0xa9]);
    assert_eq!(s, [0, 0, 0, 3, 3, 3]);
    for (text, want) in [
        ("{\"text\": \"a\"}\n{\"text\"\n", "x.jsonl:2: not JSON"),
        ("{\"text\": \"a\"}\n\n{\"txt\": 1}\n", "x.jsonl:3: it has no `text` field"),
        ("{\"text\": 7}", "x.jsonl:1: its `text` is not a string"),
    ] {
        let message = refused(&room.config(&[room.file("x.jsonl", text)]));
        assert!(message.contains(want), "{message}");
    }
}

fn shard(header: [i32; 3], tokens: &[u16]) -> Vec<u8> {
    let mut bytes: Vec<u8> = header.iter().flat_map(|w| w.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
    bytes
}

#[test]
fn token_shards_are_read_and_checked() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let gpt2 = [50256, 10, 11, 50256, 12, 50000];
    let file = room.file("x.bin", shard([20_240_520, 1, 6], &gpt2));
    let config = DataConfig { seq_len: 5, vocabulary: 50304, ..room.config(&[file]) };
    let data = open(&config).expect("data");
    let [t, y, s] = sample(&data, 5, 0);
    assert_eq!(t, [50256, 10, 11, 50256, 12]);
    assert_eq!(y, [10, 11, 50256, 12, 50000]);
    assert_eq!(s, [0, 0, 0, 3, 3], "documents are found by GPT-2's own end-of-text");
    assert!(!data.speaks_tokenizer(), "the byte tokenizer did not make these");
    let message = refused(&DataConfig { vocabulary: 50256, ..config });
    assert!(message.contains("x.bin, byte 1024 (token 0): token 50256 is not below"), "{message}");
    for (header, tokens, want) in [
        ([1, 1, 6], 6, "its first number is 1"),
        ([20_240_520, 2, 6], 6, "its version is 2"),
        ([20_240_520, 1, 7], 6, "claims 7 tokens, and it holds 6"),
        ([20_240_520, 1, -1], 6, "claims -1 tokens"),
    ] {
        let message = refused(&room.config(&[room.file("y.bin", shard(header, &gpt2[..tokens]))]));
        assert!(message.contains("y.bin") && message.contains(want), "{message}");
    }
    assert!(refused(&room.config(&[room.file("z.bin", "short")])).contains("less than the header"));
}

#[test]
fn shards_that_are_written_come_back() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let (a, b) = (room.file("a.txt", "some text"), room.file("b.txt", [255, 0, 254]));
    let tokenizer = Tokenizer::open(&TokenizerChoice::Bytes).expect("bytes");
    let out = room.0.path().join("out.bin");
    let tokens = write_bin(&[a.clone(), b.clone()], &tokenizer, &out, &mut |_| ()).expect("written");
    assert_eq!(tokens, 14);
    assert_eq!(fs::metadata(&out).expect("there").len(), 1024 + 28);
    let from_text = open(&room.config(&[a, b])).expect("data");
    let from_shard = open(&room.config(&[out])).expect("data");
    assert_eq!(windows(&from_text, 4), windows(&from_shard, 4));
    let empty = room.file("empty.txt", "");
    assert!(matches!(
        write_bin(&[empty], &tokenizer, &room.0.path().join("e.bin"), &mut |_| ()),
        Err(DataError::Empty { .. })
    ));
    assert!(!room.0.path().join("e.bin").exists(), "nothing half-written");
}

#[test]
fn what_is_not_there_or_too_short_is_said() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let text = room.file("a.txt", "abc");
    assert!(refused(&room.config(&[PathBuf::from("/no/such/file")])).contains("/no/such/file: no such file"));
    assert!(refused(&room.config(&[room.file("x.parquet", "x")])).contains("x.parquet: cannot be read"));
    let empty = room.0.path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    assert!(refused(&room.config(&[empty])).contains("no text in it"));
    assert!(refused(&room.config(&[room.file("e.txt", "")])).contains("no text in it"));
    let message = refused(&DataConfig { seq_len: 4, ..room.config(std::slice::from_ref(&text)) });
    assert_eq!(
        message,
        "the training data has 4 tokens, and a sequence of 4 needs 5; give more data or a smaller --seq-len"
    );
    let message = refused(&DataConfig { seq_len: 2, vocabulary: 98, ..room.config(&[text]) });
    assert!(message.contains("a.txt, byte 0: token 256 is not below"), "{message}");
}

#[test]
fn a_token_that_the_model_has_no_row_for_is_named_with_file_and_offset() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let says = |file: PathBuf, vocabulary: usize, tokenizer: &TokenizerChoice, want: &str| {
        let good = room.file("0-good.txt", "aaaaaaaaaaaaaaaa");
        let tokenizer = tokenizer.clone();
        // The second file of two, in the training data and in the evaluation data.
        let paths = vec![good.clone(), file];
        let train = DataConfig { vocabulary, tokenizer, ..room.config(&paths) };
        let message = refused(&train);
        assert!(message.contains(want), "{message} should contain {want}");
        let eval = DataConfig { paths: vec![good], eval_paths: paths, ..train };
        let message = refused(&eval);
        assert!(message.contains(want), "{message} should contain {want}");
    };
    let shard_of = |tokens: &[u16]| shard([20_240_520, 1, tokens.len() as i32], tokens);
    let bytes = TokenizerChoice::Bytes;
    let whole = [256, 10, 256, 11, 300, 12];
    says(room.file("whole.bin", shard_of(&whole)), 257, &bytes, "whole.bin, byte 1032 (token 4): token 300");
    let part = [9, 10, 256, 11, 300, 12];
    says(room.file("part.bin", shard_of(&part)), 257, &bytes, "part.bin, byte 1032 (token 4): token 300");
    // Beyond the stretch that is read at a time.
    let mut long = vec![256; 700_000];
    long[650_001] = 999;
    let want = format!("long.bin, byte {} (token 650001): token 999", 1024 + 2 * 650_001);
    says(room.file("long.bin", shard_of(&long)), 257, &bytes, &want);

    let bpe = TokenizerChoice::File(room.file("tokenizer.json", BPE.replace("\"abc\":4", "\"abc\":9")));
    says(room.file("b.txt", "a b cab abc a"), 7, &bpe, "b.txt, byte 8 (tokenizer");
    let lines = "{\"text\": \"ab\"}\n\n{\"text\": \"a abc\"}\n";
    says(room.file("c.jsonl", lines), 7, &bpe, "c.jsonl:3 (tokenizer");
}

const BPE: &str = r#"{"version":"1.0","truncation":null,"padding":null,
 "added_tokens":[{"id":6,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
 "normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":{"type":"Fuse"},
 "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,
 "byte_fallback":false,"ignore_merges":false,"vocab":{"a":0,"b":1,"c":2,"ab":3,"abc":4," ":5},"merges":[["a","b"],["ab","c"]]}}"#;

#[test]
fn tokenizer_files_are_used_and_checked() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let choice = TokenizerChoice::File(room.file("tokenizer.json", BPE));
    let tokenizer = Tokenizer::open(&choice).expect("a tokenizer");
    assert_eq!((tokenizer.vocabulary(), tokenizer.end_of_text()), (7, 6));
    assert_eq!(tokenizer.encode("abcab a").expect("encoded"), [4, 3, 5, 0]);
    assert_eq!(tokenizer.decode(&[6, 4, 3, 5, 0]), "abcab a");
    let config =
        DataConfig { tokenizer: choice.clone(), vocabulary: 7, ..room.config(&[room.file("a.txt", "abcab ab a")]) };
    assert_eq!(sample(&open(&config).expect("data"), 4, 0)[0], [6, 4, 3, 5]);
    let broken = [b"ab".as_slice(), &[0xff], b"c"].concat();
    let message =
        refused(&DataConfig { tokenizer: choice, vocabulary: 7, ..room.config(&[room.file("b.txt", broken)]) });
    assert!(message.contains("b.txt: byte 2 is not UTF-8"), "{message}");
    // The library is known to panic on this one.
    let crafted = BPE
        .replace(r#""a":0,"b":1,"c":2,"ab":3,"abc":4," ":5"#, r#""aa":0,"bb":1"#)
        .replace(r#"["a","b"],["ab","c"]"#, r#"["aa","bb"]"#);
    for (name, text) in [("no.json", "{}"), ("text.json", "hello"), ("crafted.json", crafted.as_str())] {
        let file = room.file(name, text);
        let message = Tokenizer::open(&TokenizerChoice::File(file)).err().expect("refused").to_string();
        assert!(message.contains(name) && message.contains("no tokenizer") && !message.contains('\n'), "{message}");
    }
    let endless = room.file("endless.json", BPE.replace("<|endoftext|>", "<x>"));
    let message = Tokenizer::open(&TokenizerChoice::File(endless)).err().expect("refused").to_string();
    assert!(message.contains("no token between documents") && message.contains("</s>"), "{message}");
    assert!(matches!(Tokenizer::open(&TokenizerChoice::File("/none.json".into())), Err(DataError::Missing(_))));
}

fn long_text(room: &Room) -> PathBuf {
    room.file("long.txt", (0..4001u32).map(|i| (i % 251) as u8).collect::<Vec<_>>())
}

#[test]
fn held_out_data_is_not_trained_on() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let text = long_text(&room);
    let data = open(&DataConfig { held_out: 0.1, ..room.config(std::slice::from_ref(&text)) }).expect("data");
    assert_eq!((data.windows(), data.eval_windows()), (900, 100));
    let [mut t, mut y, mut s] = [vec![0; 4], vec![0; 4], vec![0; 4]];
    data.eval_window(0, &mut t, &mut y, &mut s);
    // Token k of the stream is byte k - 1; window 900 starts at token 3600.
    assert_eq!(t, [3599 % 251, 3600 % 251, 3601 % 251, 3602 % 251]);
    let other = room.file("other.txt", "zzzzzzzzz");
    let config = DataConfig { held_out: 0.1, eval_paths: vec![other], ..room.config(&[text]) };
    let data = open(&config).expect("data");
    assert_eq!((data.windows(), data.eval_windows()), (1000, 2));
    data.eval_window(1, &mut t, &mut y, &mut s);
    assert_eq!(t, [122; 4]);
}

#[test]
fn every_epoch_has_every_window_in_another_order() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let data = open(&room.config(&[long_text(&room)])).expect("data");
    let epoch = |e: u64| (0..1000).map(|i| sample(&data, 4, e * 1000 + i)).collect::<Vec<_>>();
    let (mut first, mut second) = (epoch(0), epoch(1));
    assert_ne!(first, second);
    first.sort();
    second.sort();
    assert_eq!(first, second);
}

#[test]
fn tokens_are_cached_and_a_broken_cache_is_made_anew() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let text = long_text(&room);
    let config = room.config(std::slice::from_ref(&text));
    let calls = |config: &DataConfig| {
        let mut calls = 0;
        Dataset::open(config, &mut |_| calls += 1).expect("data");
        calls
    };
    assert!(calls(&config) > 0);
    assert_eq!(calls(&config), 0, "the second time the cache serves");
    let cache = fs::read_dir(room.0.path().join(".cache")).expect("a cache");
    let file = cache.map(|e| e.expect("an entry").path()).find(|p| p.extension().is_some_and(|e| e == "tokens"));
    let file = file.expect("a cached file");
    let whole = fs::read(&file).expect("read");
    for broken in [whole[..whole.len() - 1].to_vec(), vec![0; 10], [vec![1], whole[1..].to_vec()].concat()] {
        fs::write(&file, broken).expect("written");
        assert!(calls(&config) > 0, "a broken cache is not used");
        assert_eq!(fs::read(&file).expect("read"), whole);
    }
    fs::write(&text, "another text, shorter").expect("written");
    assert_eq!(open(&config).expect("data").tokens(), 22, "changed data is tokenised again");
}

#[test]
fn a_cache_that_cannot_be_written_is_done_without() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let blocked = room.file("a-file", "");
    let config = DataConfig { cache_dir: Some(blocked.join("below")), ..room.config(&[long_text(&room)]) };
    assert_eq!(open(&config).expect("data").tokens(), 4002);
}

#[test]
fn ranks_that_open_at_once_tokenise_once() {
    let _limit = testkit::time_limit(20);
    let room = Room::new();
    let text = long_text(&room);
    let counts: Vec<usize> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..4)
            .map(|_| {
                let config = room.config(std::slice::from_ref(&text));
                scope.spawn(move || {
                    let mut read = 0;
                    Dataset::open(&config, &mut |p| read += usize::from(p.what.ends_with("long.txt"))).expect("data");
                    read
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().expect("no panic")).collect()
    });
    assert_eq!(counts.iter().filter(|c| **c > 0).count(), 1, "{counts:?}");
}

/// What packing means, done plainly.
fn naive(documents: &[Vec<u8>], n: usize) -> Vec<[Vec<i32>; 3]> {
    let mut stream = Vec::new();
    for document in documents.iter().filter(|d| !d.is_empty()) {
        stream.push(256);
        stream.extend(document.iter().map(|b| i32::from(*b)));
    }
    let mut all: Vec<_> = (0..stream.len().saturating_sub(1) / n)
        .map(|w| {
            let t = stream[w * n..(w + 1) * n].to_vec();
            let y = stream[w * n + 1..(w + 1) * n + 1].to_vec();
            let s = (0..n).map(|i| (0..=i).rev().find(|j| t[*j] == 256).unwrap_or(0) as i32).collect();
            [t, y, s]
        })
        .collect();
    all.sort();
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_packed_as_plainly(
        documents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..6),
        n in 1usize..7,
    ) {
        let _limit = testkit::time_limit(60);
        let room = Room::new();
        let paths: Vec<_> = documents.iter().enumerate().map(|(i, d)| room.file(&format!("{i}.txt"), d)).collect();
        let want = naive(&documents, n);
        match open(&DataConfig { seq_len: n, ..room.config(&paths) }) {
            Ok(data) => prop_assert_eq!(windows(&data, n), want),
            Err(DataError::Empty { .. } | DataError::TooShort { .. }) => prop_assert!(want.is_empty()),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn text_with_half_a_letter_decodes_all_the_same() {
    let _limit = testkit::time_limit(10);
    let tokenizer = Tokenizer::open(&TokenizerChoice::Bytes).expect("bytes");
    assert_eq!(tokenizer.decode(&[256, 0xc3, 0xa9, 0xc3]), "\u{e9}\u{fffd}");
}
