//! Both real tokenizers against their goldens, and what must hold for any tokenizer.

mod common;

use dunlin_model::loader::ModelFiles;
use dunlin_model::tokenizer::{Detokenizer, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

static SMOLLM2: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| load(common::smollm2()));
static GEMMA: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| load(common::gemma()));

fn load(path: PathBuf) -> Arc<Tokenizer> {
    Arc::new(ModelFiles::open(&path).unwrap().tokenizer().unwrap())
}

fn golden(name: &str) -> Value {
    let path = common::data("golden").join(format!("{name}.tokenizer.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn check_golden(tokenizer: &Tokenizer, golden: &Value) {
    let strings = golden["strings"].as_array().unwrap();
    assert_eq!(strings.len(), 72);
    for s in strings {
        let text = s["text"].as_str().unwrap();
        let want = ids(&s["ids"]);
        assert_eq!(tokenizer.encode(text, true).unwrap(), want, "{text:?}");
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&s["ids_no_special"]), "{text:?}");
        assert_eq!(tokenizer.decode(&want, false), s["decoded"].as_str().unwrap(), "{text:?}");
        let plain = s["decoded_skip_special"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&want, true), plain, "{text:?}");
    }
    for single in golden["single"].as_array().unwrap() {
        let id = single[0].as_u64().unwrap() as u32;
        let text = single[2].as_str().unwrap();
        // Where one token is not a whole character, the golden has U+FFFD, and we hold bytes.
        if !text.contains('\u{FFFD}') {
            assert_eq!(tokenizer.decode(&[id], false), text, "token {id}");
        }
        assert!(!tokenizer.id_to_bytes(id).is_empty());
    }
}

#[test]
fn smollm2_tokenises_as_its_goldens() {
    check_golden(&SMOLLM2, &golden("smollm2-135m-instruct-q4_1"));
    assert_eq!(SMOLLM2.vocab_size(), 49152);
    assert!(SMOLLM2.stop_ids().contains(&2));
    assert!(!SMOLLM2.adds_bos());
}

#[test]
fn gemma3_tokenises_as_its_goldens() {
    check_golden(&GEMMA, &golden("gemma3-270m-q4_k_m"));
    assert_eq!(GEMMA.vocab_size(), 262_144);
    assert!(GEMMA.stop_ids().is_superset(&[1, 106].into()));
    assert_eq!(GEMMA.encode_prompt("", true).unwrap(), [2]);
    assert_eq!(GEMMA.encode_prompt("<bos>", true).unwrap(), [2]);
}

/// Case C55: characters of one to many tokens, cut anywhere.
#[test]
fn every_piece_of_a_hard_text_is_whole_characters() {
    let text = "ďábelské 🫠 龜 👩‍👩‍👧 T́";
    for tokenizer in [&*SMOLLM2, &*GEMMA] {
        let ids = tokenizer.encode(text, true).unwrap();
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), true);
        let mut out = String::new();
        for (i, id) in ids.iter().enumerate() {
            out.push_str(&detokenizer.push(*id));
            assert!(text.starts_with(&out), "{out:?}");
            // As if max_tokens were reached here: no U+FFFD, the unfinished bytes are dropped.
            let whole = tokenizer.decode(&ids[..=i], true);
            assert_eq!(whole, out);
        }
        assert_eq!(out, text);
    }
}

proptest! {
    #[test]
    fn pieces_add_up_to_the_decoded_whole(
        ids in prop::collection::vec(0u32..300_000, 0..60),
        // Byte tokens, where characters fall apart.
        bytes in prop::collection::vec(238u32..494, 0..30),
        skip_special in any::<bool>(),
    ) {
        for tokenizer in [&*SMOLLM2, &*GEMMA] {
            let all: Vec<u32> = ids.iter().chain(&bytes).chain(&ids).copied().collect();
            let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip_special);
            let mut text: String = all.iter().map(|id| detokenizer.push(*id)).collect();
            prop_assert!(detokenizer.held().len() < 4);
            text.push_str(&detokenizer.finish());
            prop_assert_eq!(text, tokenizer.decode(&all, skip_special));
        }
    }

    #[test]
    fn any_text_survives_the_round_trip(text in any::<String>()) {
        // SentencePiece cannot tell U+2581 from a space; no other character is lost.
        prop_assume!(!text.contains('▁'));
        for tokenizer in [&*SMOLLM2, &*GEMMA] {
            for special in [true, false] {
                let ids = tokenizer.encode(&text, special).unwrap();
                prop_assert_eq!(&tokenizer.decode(&ids, false), &text);
            }
        }
    }

    #[test]
    fn plain_text_never_makes_control_tokens(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "<|im_start|>", "<|im_end|>", "<eos>", "<bos>", "<start_of_turn>", "<pad>", "<",
                "|", "im_", "end", ">", " ", "hello",
            ]),
            0..12),
    ) {
        for tokenizer in [&*SMOLLM2, &*GEMMA] {
            let ids = tokenizer.encode(&parts.concat(), false).unwrap();
            prop_assert!(ids.iter().all(|id| !tokenizer.is_special(*id)), "{ids:?}");
        }
    }
}

#[test]
fn chat_templates_render_as_the_goldens_tokenise() {
    for (model, name) in
        [(common::smollm2(), "smollm2-135m-instruct-q4_1"), (common::gemma(), "gemma3-270m-q4_k_m")]
    {
        let files = ModelFiles::open(&model).unwrap();
        let tokenizer = files.tokenizer().unwrap();
        let template = files.chat_template(&tokenizer).unwrap();
        assert_eq!(template.is_fallback(), name.starts_with("gemma"));
        let path = common::data("golden").join(format!("{name}.logits.json"));
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut chats = 0;
        for prompt in golden["prompts"].as_array().unwrap() {
            let want = ids(&prompt["prompt_ids"]);
            let text = match prompt.get("messages") {
                None => prompt["text"].as_str().unwrap().to_owned(),
                Some(messages) => {
                    chats += 1;
                    let input = dunlin_model::chat::ChatInput {
                        messages: messages.as_array().unwrap().clone(),
                        add_generation_prompt: true,
                        ..Default::default()
                    };
                    template.render(&input).unwrap()
                }
            };
            assert_eq!(tokenizer.encode_prompt(&text, true).unwrap(), want, "{}", prompt["id"]);
        }
        assert_eq!(chats, 3);
    }
}

/// The folders of our own tiny models: tokenizer.json, settings and template.
#[test]
fn hugging_face_folders_tokenise_as_their_goldens() {
    for name in ["tiny-llama", "tiny-mixtral"] {
        let folder = common::data(name);
        let files = ModelFiles::open(&folder).unwrap();
        let tokenizer = files.tokenizer().unwrap();
        assert_eq!(tokenizer.stop_ids(), &[1].into());
        assert_eq!(tokenizer.bos(), Some(0));
        let golden: Value =
            serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap())
                .unwrap();
        for prompt in golden["prompts"].as_array().unwrap() {
            let text = prompt["prompt"].as_str().unwrap();
            let want = ids(&prompt["prompt_ids"]);
            assert_eq!(tokenizer.encode_prompt(text, true).unwrap(), want, "{text:?}");
            assert_eq!(tokenizer.decode(&want, true), text);
        }
        let template = files.chat_template(&tokenizer).unwrap();
        let input = dunlin_model::chat::ChatInput {
            messages: vec![serde_json::json!({"role": "user", "content": "Hi"})],
            add_generation_prompt: true,
            ..Default::default()
        };
        let text = template.render(&input).unwrap();
        assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
        assert!(!template.is_fallback());
    }
}
