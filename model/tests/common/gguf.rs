//! Writes GGUF files, valid or not, for tests.

/// One file in the making.
#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    pub metadata: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
}

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub kind: u32,
    /// Offset in the table; where the data really goes is up to `build`.
    pub offset: Option<u64>,
    pub data: Vec<u8>,
}

pub fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

/// A typed array: element type, count, elements.
pub fn array(element: u32, items: &[Vec<u8>]) -> Vec<u8> {
    let head = [&element.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()].concat();
    [head, items.concat()].concat()
}

impl Gguf {
    pub fn new() -> Self {
        Self { version: 3, metadata: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    /// A metadata value of any type.
    pub fn raw(mut self, key: &str, kind: u32, value: Vec<u8>) -> Self {
        self.metadata.push((key.into(), [&kind.to_le_bytes()[..], &value].concat()));
        self
    }
    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, string(value))
    }
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, value.to_le_bytes().to_vec())
    }
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, value.to_le_bytes().to_vec())
    }
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, vec![u8::from(value)])
    }
    pub fn strs<S: AsRef<str>>(self, key: &str, values: &[S]) -> Self {
        let items: Vec<Vec<u8>> = values.iter().map(|v| string(v.as_ref())).collect();
        self.raw(key, 9, array(8, &items))
    }
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let items: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
        self.raw(key, 9, array(5, &items))
    }
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let items: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
        self.raw(key, 9, array(6, &items))
    }

    /// A float32 tensor of counting values; dimensions as in the file, fastest first.
    pub fn tensor(mut self, name: &str, dims: &[u64]) -> Self {
        let n = dims.iter().product::<u64>();
        let data = (0..n).flat_map(|i| (i as f32 / 64.0).to_le_bytes()).collect();
        let dims = dims.to_vec();
        self.tensors.push(Tensor { name: name.into(), dims, kind: 0, offset: None, data });
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            out.extend(string(key));
            out.extend(value);
        }
        let mut data = Vec::new();
        for t in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend(string(&t.name));
            out.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend(t.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&t.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}

/// A llama of one layer with a byte-level tokenizer: every part of a real file, in 12 KiB.
pub fn llama() -> Gguf {
    let byte = |b: u32| match b {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => b,
        0..=0x20 => 0x100 + b,
        0x7F..=0xA0 => 0x121 + b - 0x7F,
        _ => 0x143,
    };
    let mut tokens: Vec<String> =
        (0..256).filter_map(|b| char::from_u32(byte(b))).map(String::from).collect();
    tokens.extend(["Ġt", "he", "Ġthe", "<|end|>"].map(String::from));
    let mut kinds = vec![1; tokens.len()];
    *kinds.last_mut().unwrap() = 3;
    let vocab = tokens.len() as u64;
    Gguf::new()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", 8)
        .u32("llama.feed_forward_length", 16)
        .u32("llama.attention.head_count", 2)
        .u32("llama.attention.head_count_kv", 1)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "smollm")
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .strs("tokenizer.ggml.merges", &["Ġ t", "h e", "Ġt he"])
        .u32("tokenizer.ggml.eos_token_id", vocab as u32 - 1)
        .bool("tokenizer.ggml.add_bos_token", false)
        .str("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
        .tensor("token_embd.weight", &[8, vocab])
        .tensor("blk.0.attn_norm.weight", &[8])
        .tensor("blk.0.attn_q.weight", &[8, 8])
        .tensor("output_norm.weight", &[8])
}
