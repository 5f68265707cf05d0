//! Which tensor of a model file is which weight of the forward pass.
//!
//! The forward pass names weights by [`WeightId`]; this module knows how GGUF and Hugging Face
//! checkpoints spell them. It knows nothing of devices.

use crate::error::LoadError;
use crate::loader::ModelFiles;
use crate::spec::{Family, ModelSpec};
use dunlin_backend::HostTensor;

/// How a file spells its tensors' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameLayout {
    Gguf,
    HuggingFace,
}

/// Where weights come from: an opened model, or a test's own.
pub trait WeightSource: Send + Sync {
    fn spec(&self) -> &ModelSpec;
    fn layout(&self) -> NameLayout;
    fn tensor(&self, file_name: &str) -> Result<HostTensor, LoadError>;
    fn has(&self, file_name: &str) -> bool;
    /// Whether the whole tensor is what it was when the file was first read.
    fn verify(&self, _tensor: &HostTensor) -> Result<(), LoadError> {
        Ok(())
    }
}

impl WeightSource for ModelFiles {
    fn spec(&self) -> &ModelSpec {
        ModelFiles::spec(self)
    }
    fn layout(&self) -> NameLayout {
        if self.is_gguf() { NameLayout::Gguf } else { NameLayout::HuggingFace }
    }
    fn tensor(&self, file_name: &str) -> Result<HostTensor, LoadError> {
        ModelFiles::tensor(self, file_name)
    }
    fn has(&self, file_name: &str) -> bool {
        ModelFiles::has(self, file_name)
    }
    fn verify(&self, tensor: &HostTensor) -> Result<(), LoadError> {
        ModelFiles::verify(self, tensor)
    }
}

/// A weight by its part in the forward pass. `usize` is the global layer, then the expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightId {
    /// `[vocab, hidden]`
    TokenEmbedding,
    /// `[hidden]`
    OutputNorm,
    /// `[vocab, hidden]`; absent where the head is tied to the embedding.
    Output,
    AttnNorm(usize),
    /// `[heads * head_dim, hidden]`
    Q(usize),
    /// `[kv_heads * head_dim, hidden]`
    K(usize),
    V(usize),
    QBias(usize),
    KBias(usize),
    VBias(usize),
    /// `[head_dim]`
    QNorm(usize),
    KNorm(usize),
    /// `[hidden, heads * head_dim]`
    AttnOut(usize),
    PostAttnNorm(usize),
    FfnNorm(usize),
    PostFfnNorm(usize),
    /// `[ffn, hidden]`
    Gate(usize),
    Up(usize),
    /// `[hidden, ffn]`
    Down(usize),
    /// `[experts, hidden]`
    Router(usize),
    ExpertGate(usize, usize),
    ExpertUp(usize, usize),
    ExpertDown(usize, usize),
}

/// Takes `id` from `source`. Expert matrices that a file stacks are sliced apart, without a copy.
pub fn weight(source: &dyn WeightSource, id: WeightId) -> Result<HostTensor, LoadError> {
    let family = source.spec().family;
    match source.layout() {
        NameLayout::HuggingFace => source.tensor(&hugging_face_name(family, id)),
        NameLayout::Gguf => {
            let tensor = source.tensor(&gguf_name(id))?;
            match id {
                WeightId::ExpertGate(_, e)
                | WeightId::ExpertUp(_, e)
                | WeightId::ExpertDown(_, e) => {
                    let experts = source.spec().moe.as_ref().map_or(1, |m| m.experts);
                    let rows = tensor.rows / experts.max(1);
                    Ok(tensor.slice_rows(e * rows..(e + 1) * rows))
                }
                _ => Ok(tensor),
            }
        }
    }
}

/// The file's tensor that [`weight`] takes `id` from, whole.
pub fn tensor_of(source: &dyn WeightSource, id: WeightId) -> Result<HostTensor, LoadError> {
    match source.layout() {
        NameLayout::HuggingFace => source.tensor(&hugging_face_name(source.spec().family, id)),
        NameLayout::Gguf => source.tensor(&gguf_name(id)),
    }
}

/// Whether `source` holds `id`.
pub fn has_weight(source: &dyn WeightSource, id: WeightId) -> bool {
    match source.layout() {
        NameLayout::Gguf => source.has(&gguf_name(id)),
        NameLayout::HuggingFace => source.has(&hugging_face_name(source.spec().family, id)),
    }
}

/// Whether norm weights are stored without the one that the formula adds (Hugging Face gemma).
pub fn norms_lack_one(source: &dyn WeightSource) -> bool {
    source.spec().family == Family::Gemma3 && source.layout() == NameLayout::HuggingFace
}

fn gguf_name(id: WeightId) -> String {
    use WeightId::*;
    match id {
        TokenEmbedding => "token_embd.weight".into(),
        OutputNorm => "output_norm.weight".into(),
        Output => "output.weight".into(),
        AttnNorm(l) => format!("blk.{l}.attn_norm.weight"),
        Q(l) => format!("blk.{l}.attn_q.weight"),
        K(l) => format!("blk.{l}.attn_k.weight"),
        V(l) => format!("blk.{l}.attn_v.weight"),
        QBias(l) => format!("blk.{l}.attn_q.bias"),
        KBias(l) => format!("blk.{l}.attn_k.bias"),
        VBias(l) => format!("blk.{l}.attn_v.bias"),
        QNorm(l) => format!("blk.{l}.attn_q_norm.weight"),
        KNorm(l) => format!("blk.{l}.attn_k_norm.weight"),
        AttnOut(l) => format!("blk.{l}.attn_output.weight"),
        PostAttnNorm(l) => format!("blk.{l}.post_attention_norm.weight"),
        FfnNorm(l) => format!("blk.{l}.ffn_norm.weight"),
        PostFfnNorm(l) => format!("blk.{l}.post_ffw_norm.weight"),
        Gate(l) => format!("blk.{l}.ffn_gate.weight"),
        Up(l) => format!("blk.{l}.ffn_up.weight"),
        Down(l) => format!("blk.{l}.ffn_down.weight"),
        Router(l) => format!("blk.{l}.ffn_gate_inp.weight"),
        ExpertGate(l, _) => format!("blk.{l}.ffn_gate_exps.weight"),
        ExpertUp(l, _) => format!("blk.{l}.ffn_up_exps.weight"),
        ExpertDown(l, _) => format!("blk.{l}.ffn_down_exps.weight"),
    }
}

fn hugging_face_name(family: Family, id: WeightId) -> String {
    use WeightId::*;
    let layer = |l: usize, rest: &str| format!("model.layers.{l}.{rest}.weight");
    let bias = |l: usize, rest: &str| format!("model.layers.{l}.self_attn.{rest}.bias");
    let expert =
        |l: usize, e: usize, w: &str| layer(l, &format!("block_sparse_moe.experts.{e}.{w}"));
    let gemma = family == Family::Gemma3;
    match id {
        TokenEmbedding => "model.embed_tokens.weight".into(),
        OutputNorm => "model.norm.weight".into(),
        Output => "lm_head.weight".into(),
        AttnNorm(l) => layer(l, "input_layernorm"),
        Q(l) => layer(l, "self_attn.q_proj"),
        K(l) => layer(l, "self_attn.k_proj"),
        V(l) => layer(l, "self_attn.v_proj"),
        QBias(l) => bias(l, "q_proj"),
        KBias(l) => bias(l, "k_proj"),
        VBias(l) => bias(l, "v_proj"),
        QNorm(l) => layer(l, "self_attn.q_norm"),
        KNorm(l) => layer(l, "self_attn.k_norm"),
        AttnOut(l) => layer(l, "self_attn.o_proj"),
        PostAttnNorm(l) => layer(l, "post_attention_layernorm"),
        // Gemma norms twice around the feed-forward and names the one before it so.
        FfnNorm(l) if gemma => layer(l, "pre_feedforward_layernorm"),
        FfnNorm(l) => layer(l, "post_attention_layernorm"),
        PostFfnNorm(l) => layer(l, "post_feedforward_layernorm"),
        Gate(l) => layer(l, "mlp.gate_proj"),
        Up(l) => layer(l, "mlp.up_proj"),
        Down(l) => layer(l, "mlp.down_proj"),
        Router(l) => layer(l, "block_sparse_moe.gate"),
        ExpertGate(l, e) => expert(l, e, "w1"),
        ExpertUp(l, e) => expert(l, e, "w3"),
        ExpertDown(l, e) => expert(l, e, "w2"),
    }
}
