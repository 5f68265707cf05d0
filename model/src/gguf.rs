//! GGUF version 3 files: metadata and tensor table, over a memory map.
//!
//! The file is walked once and checked as a whole: every count is bounded by the bytes that are
//! left, every tensor lies inside the data section and overlaps no other. Arrays stay in the map
//! (a vocabulary of 262,144 tokens costs nothing until someone iterates over it), so parsing
//! allocates in proportion to the number of keys and tensors alone. No input panics.
//!
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. This module does not
//! know what any key means except `general.alignment` and `split.count`.

use crate::error::LoadError;
use crate::map::{Mapped, map_file};
use bytes::Bytes;
use dunlin_backend::{DType, HostTensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Most metadata keys, tensors, and nesting levels of arrays a file may have.
pub const MAX_KEYS: u64 = 65_536;
pub const MAX_TENSORS: u64 = 1 << 20;
pub const MAX_DEPTH: u32 = 4;
/// Longest key or tensor name in bytes (the format says 65,535 and 64).
const MAX_NAME: u64 = 1024;
/// No tensor is longer than this in any direction.
const MAX_DIM: usize = 1 << 48;
const MAX_ALIGNMENT: u64 = 1 << 16;
const DEFAULT_ALIGNMENT: u64 = 32;

/// A checked GGUF file.
#[derive(Debug, Clone)]
pub struct Gguf {
    path: PathBuf,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
    /// The data section; offsets of tensors are relative to it.
    data: Bytes,
    /// The whole file, and how much of it is header, metadata and tensor table.
    file: Bytes,
    header_len: usize,
    /// Unless `file` came from elsewhere.
    map: Option<Mapped>,
}

/// Where a tensor lies in the data section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub dtype: DType,
    /// As in the file: the fastest-varying dimension first.
    pub dims: Vec<usize>,
    pub offset: usize,
    pub bytes: usize,
}

/// A metadata value. Integers of all widths are one kind, floats another.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Int(i64),
    /// Beyond `i64::MAX`.
    Big(u64),
    Float(f64),
    Bool(bool),
    Str(String),
    Array(Array),
}

/// An array that stays in the mapped file.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    element: u32,
    len: usize,
    /// Checked while parsing: holds exactly `len` elements.
    bytes: Bytes,
}

impl Gguf {
    /// Maps and checks the file at `path`.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let map = map_file(path)?;
        Ok(Self { map: Some(map.clone()), ..Self::parse(path, map.bytes())? })
    }

    /// Checks `file`; `path` is only for messages.
    pub fn parse(path: &Path, file: Bytes) -> Result<Self, LoadError> {
        let mut r = Reader { path, file: &file, at: 0 };
        let (tensor_count, key_count) = header(&mut r)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..key_count {
            let at = r.at;
            let key = r.string(MAX_NAME, "a metadata key")?;
            let value = value(&mut r, &key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(r.damaged(at, format!("metadata key '{key}' appears twice")));
            }
        }
        if metadata.get("split.count").and_then(Value::int).is_some_and(|n| n > 1) {
            return Err(LoadError::unsupported(
                path,
                "is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)",
            ));
        }
        let alignment = alignment(path, &metadata)?;
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let at = r.at;
            let (name, info) = tensor_info(&mut r, alignment)?;
            if tensors.insert(name.clone(), info).is_some() {
                return Err(r.damaged(at, format!("tensor '{name}' appears twice")));
            }
        }
        let end = r.at;
        let start = end
            .checked_next_multiple_of(alignment as usize)
            .filter(|_| tensor_count > 0)
            .unwrap_or(end)
            .min(file.len());
        let data = file.slice(start..);
        check_layout(path, &tensors, data.len())?;
        Ok(Self {
            path: path.to_owned(),
            metadata,
            tensors,
            data,
            header_len: end,
            file,
            map: None,
        })
    }

    /// See [`Mapped::release`].
    pub fn release(&self) {
        self.map.iter().for_each(Mapped::release);
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }
    /// The bytes before the data section, without its padding.
    pub fn header(&self) -> &[u8] {
        &self.file[..self.header_len]
    }
    /// Every byte of the file.
    pub fn file(&self) -> &[u8] {
        &self.file
    }
    pub fn bytes(&self) -> u64 {
        self.file.len() as u64
    }

    /// The tensor as a matrix: `cols` is the file's first dimension, `rows` the product of the
    /// others (experts are stacked in rows). Borrows the map.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, LoadError> {
        let info = self
            .tensors
            .get(name)
            .ok_or_else(|| LoadError::tensor(&self.path, name, "is missing"))?;
        let cols = info.dims.first().copied().unwrap_or(1);
        let rows = info.dims.iter().skip(1).product();
        let data = self.data.slice(info.offset..info.offset + info.bytes);
        HostTensor::new(name, info.dtype, rows, cols, data)
            .map_err(|e| LoadError::tensor(&self.path, name, e.to_string()))
    }

    /// The value of `key`, or an error that says it is missing.
    pub fn require(&self, key: &str) -> Result<&Value, LoadError> {
        self.metadata.get(key).ok_or_else(|| LoadError::config(&self.path, key, "is missing"))
    }
}

impl Value {
    pub fn int(&self) -> Option<i64> {
        match self {
            Value::Int(v) => Some(*v),
            _ => None,
        }
    }
    pub fn float(&self) -> Option<f64> {
        match self {
            Value::Float(v) => Some(*v),
            Value::Int(v) => Some(*v as f64),
            _ => None,
        }
    }
    pub fn bool(&self) -> Option<bool> {
        match self {
            Value::Bool(v) => Some(*v),
            _ => None,
        }
    }
    pub fn str(&self) -> Option<&str> {
        match self {
            Value::Str(v) => Some(v),
            _ => None,
        }
    }
    pub fn array(&self) -> Option<&Array> {
        match self {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }
}

impl Array {
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, if they are strings.
    pub fn strings(&self) -> Option<impl Iterator<Item = &str>> {
        (self.element == kind::STRING).then(|| {
            let mut rest: &[u8] = &self.bytes;
            std::iter::from_fn(move || {
                let (head, tail) = rest.split_first_chunk::<8>()?;
                let len = usize::try_from(u64::from_le_bytes(*head)).ok()?;
                let text = tail.get(..len)?;
                rest = tail.get(len..)?;
                std::str::from_utf8(text).ok()
            })
        })
    }

    /// The elements, if they are integers or booleans.
    pub fn ints(&self) -> Option<impl Iterator<Item = i64>> {
        let width = scalar_width(self.element)?;
        let integral = !matches!(self.element, kind::F32 | kind::F64);
        integral.then(|| {
            self.bytes.chunks_exact(width).map(|c| match scalar(self.element, c) {
                Some(Value::Int(v)) => v,
                Some(Value::Bool(v)) => i64::from(v),
                _ => i64::MAX,
            })
        })
    }

    /// The elements, if they are floats.
    pub fn floats(&self) -> Option<impl Iterator<Item = f64>> {
        let width = scalar_width(self.element)?;
        matches!(self.element, kind::F32 | kind::F64).then(|| {
            self.bytes
                .chunks_exact(width)
                .map(|c| scalar(self.element, c).and_then(|v| v.float()).unwrap_or(f64::NAN))
        })
    }
}

/// Metadata value types of the format.
mod kind {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// A cursor that never reads past the end.
struct Reader<'a> {
    path: &'a Path,
    file: &'a Bytes,
    at: usize,
}

impl Reader<'_> {
    fn damaged(&self, at: usize, reason: impl Into<String>) -> LoadError {
        LoadError::Damaged { path: self.path.to_owned(), at: at as u64, reason: reason.into() }
    }

    fn left(&self) -> u64 {
        (self.file.len() - self.at) as u64
    }

    fn take(&mut self, n: u64, what: &str) -> Result<&[u8], LoadError> {
        if n > self.left() {
            let reason = format!("{what} needs {n} bytes, the file has {} more", self.left());
            return Err(self.damaged(self.at, reason));
        }
        let start = self.at;
        self.at += n as usize;
        Ok(&self.file[start..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string(&mut self, limit: u64, what: &str) -> Result<String, LoadError> {
        let at = self.at;
        let len = self.u64(what)?;
        if len > limit {
            return Err(self.damaged(at, format!("{what} has {len} bytes, the limit is {limit}")));
        }
        let bytes = self.take(len, what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(self.damaged(at, format!("{what} is not UTF-8"))),
        }
    }
}

/// Checks magic and version; returns (tensors, keys), both bounded.
fn header(r: &mut Reader) -> Result<(u64, u64), LoadError> {
    if r.array::<4>("the magic number")? != *b"GGUF" {
        return Err(LoadError::not_a_model(r.path, "is not a GGUF file (no 'GGUF' at its start)"));
    }
    match r.u32("the version")? {
        3 => {}
        v if v.swap_bytes() <= 3 => {
            return Err(LoadError::unsupported(r.path, "is a big-endian GGUF file"));
        }
        v => {
            let reason = format!("is GGUF version {v}; only version 3 is read, convert it again");
            return Err(LoadError::unsupported(r.path, reason));
        }
    }
    let at = r.at;
    let tensors = r.u64("the tensor count")?;
    let keys = r.u64("the metadata count")?;
    // The smallest entries: a tensor with an empty name and one dimension, a one-byte value.
    for (what, n, limit, least) in
        [("tensors", tensors, MAX_TENSORS, 32), ("metadata keys", keys, MAX_KEYS, 13)]
    {
        if n > limit || n.saturating_mul(least) > r.left() {
            let reason = format!("{n} {what} cannot be in a file of {} bytes", r.file.len());
            return Err(r.damaged(at, reason));
        }
    }
    Ok((tensors, keys))
}

fn value(r: &mut Reader, key: &str) -> Result<Value, LoadError> {
    let at = r.at;
    let kind = r.u32("a value type")?;
    match kind {
        kind::STRING => {
            let limit = r.left();
            Ok(Value::Str(r.string(limit, &format!("'{key}'"))?))
        }
        kind::ARRAY => {
            let element = r.u32("an array type")?;
            let len = r.u64("an array length")?;
            let start = r.at;
            skip_array(r, key, element, len, 1)?;
            let bytes = r.file.slice(start..r.at);
            Ok(Value::Array(Array { element, len: len as usize, bytes }))
        }
        _ => {
            let Some(width) = scalar_width(kind) else {
                return Err(r.damaged(at, format!("'{key}' has unknown value type {kind}")));
            };
            let bytes = r.take(width as u64, key)?;
            let value = scalar(kind, bytes);
            value.ok_or_else(|| r.damaged(at, format!("'{key}' is neither true nor false")))
        }
    }
}

/// Walks over `len` elements, so that iterating over them later cannot fail.
fn skip_array(
    r: &mut Reader,
    key: &str,
    element: u32,
    len: u64,
    depth: u32,
) -> Result<(), LoadError> {
    let at = r.at;
    if depth > MAX_DEPTH {
        return Err(r.damaged(at, format!("'{key}' nests arrays more than {MAX_DEPTH} deep")));
    }
    let least = match element {
        kind::STRING => 8,
        kind::ARRAY => 12,
        _ => match scalar_width(element) {
            Some(width) => width as u64,
            None => {
                let reason = format!("'{key}' is an array of unknown type {element}");
                return Err(r.damaged(at, reason));
            }
        },
    };
    let Some(bytes) = len.checked_mul(least).filter(|b| *b <= r.left()) else {
        let left = r.left();
        let reason = format!("'{key}' has {len} elements, but the file only {left} more bytes");
        return Err(r.damaged(at, reason));
    };
    match element {
        kind::STRING => {
            for i in 0..len {
                let at = r.at;
                let n = r.u64(key)?;
                if std::str::from_utf8(r.take(n, key)?).is_err() {
                    return Err(r.damaged(at, format!("'{key}'[{i}] is not UTF-8")));
                }
            }
        }
        kind::ARRAY => {
            for _ in 0..len {
                let inner = r.u32(key)?;
                let n = r.u64(key)?;
                skip_array(r, key, inner, n, depth + 1)?;
            }
        }
        _ => {
            r.take(bytes, key)?;
        }
    }
    Ok(())
}

const fn scalar_width(kind: u32) -> Option<usize> {
    match kind {
        kind::U8 | kind::I8 | kind::BOOL => Some(1),
        kind::U16 | kind::I16 => Some(2),
        kind::U32 | kind::I32 | kind::F32 => Some(4),
        kind::U64 | kind::I64 | kind::F64 => Some(8),
        _ => None,
    }
}

/// Decodes one scalar; `None` for a boolean that is neither 0 nor 1, or a wrong width.
fn scalar(kind: u32, b: &[u8]) -> Option<Value> {
    Some(match kind {
        kind::U8 => Value::Int(u8::from_le_bytes(b.try_into().ok()?).into()),
        kind::I8 => Value::Int(i8::from_le_bytes(b.try_into().ok()?).into()),
        kind::U16 => Value::Int(u16::from_le_bytes(b.try_into().ok()?).into()),
        kind::I16 => Value::Int(i16::from_le_bytes(b.try_into().ok()?).into()),
        kind::U32 => Value::Int(u32::from_le_bytes(b.try_into().ok()?).into()),
        kind::I32 => Value::Int(i32::from_le_bytes(b.try_into().ok()?).into()),
        kind::I64 => Value::Int(i64::from_le_bytes(b.try_into().ok()?)),
        kind::U64 => {
            let v = u64::from_le_bytes(b.try_into().ok()?);
            i64::try_from(v).map_or(Value::Big(v), Value::Int)
        }
        kind::F32 => Value::Float(f32::from_le_bytes(b.try_into().ok()?).into()),
        kind::F64 => Value::Float(f64::from_le_bytes(b.try_into().ok()?)),
        kind::BOOL => match b {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            _ => return None,
        },
        _ => return None,
    })
}

fn alignment(path: &Path, metadata: &BTreeMap<String, Value>) -> Result<u64, LoadError> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    match value.int().and_then(|v| u64::try_from(v).ok()) {
        Some(v) if v.is_power_of_two() && v <= MAX_ALIGNMENT => Ok(v),
        _ => {
            let reason = format!("must be a power of two up to {MAX_ALIGNMENT}, is {value:?}");
            Err(LoadError::config(path, KEY, reason))
        }
    }
}

fn tensor_info(r: &mut Reader, alignment: u64) -> Result<(String, TensorInfo), LoadError> {
    let at = r.at;
    let name = r.string(MAX_NAME, "a tensor name")?;
    let rank = r.u32(&name)?;
    if !(1..=4).contains(&rank) {
        return Err(r.damaged(at, format!("tensor '{name}' has {rank} dimensions (1 to 4)")));
    }
    let mut dims = Vec::with_capacity(4);
    for _ in 0..rank {
        let dim = r.u64(&name)?;
        match usize::try_from(dim) {
            Ok(d) if (1..=MAX_DIM).contains(&d) => dims.push(d),
            _ => return Err(r.damaged(at, format!("tensor '{name}' has a dimension of {dim}"))),
        }
    }
    let code = r.u32(&name)?;
    let offset = r.u64(&name)?;
    let dtype = dtype(code).map_err(|known| {
        let reason = format!(
            "has type {known} ({code}), which is not supported; \
             supported are F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K"
        );
        LoadError::tensor(r.path, &name, reason)
    })?;
    let cols = dims.first().copied().unwrap_or(0);
    let Some(row) = dtype.row_bytes(cols) else {
        let block = dtype.block_elements();
        let reason = format!("has rows of {cols} elements, not a multiple of {block} ({dtype:?})");
        return Err(LoadError::tensor(r.path, &name, reason));
    };
    let bytes = dims.iter().skip(1).try_fold(row, |n, d| n.checked_mul(*d));
    let (Some(bytes), Ok(start)) = (bytes, usize::try_from(offset)) else {
        return Err(
            r.damaged(at, format!("tensor '{name}' {dims:?} at {offset} is absurdly large"))
        );
    };
    if offset % alignment != 0 {
        let reason = format!("tensor '{name}' at {offset} is not aligned to {alignment} bytes");
        return Err(r.damaged(at, reason));
    }
    Ok((name, TensorInfo { dtype, dims, offset: start, bytes }))
}

/// Every tensor lies inside the data section, none overlaps another.
fn check_layout(
    path: &Path,
    tensors: &BTreeMap<String, TensorInfo>,
    size: usize,
) -> Result<(), LoadError> {
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, t)| t.offset);
    let mut before: Option<(&String, usize)> = None;
    for (name, t) in order {
        let Some(end) = t.offset.checked_add(t.bytes).filter(|end| *end <= size) else {
            let reason = format!(
                "needs {} bytes at {} of the data section, which has {size}; \
                 the file is truncated, fetch it again",
                t.bytes, t.offset
            );
            return Err(LoadError::tensor(path, name, reason));
        };
        if let Some((other, _)) = before.filter(|(_, end)| *end > t.offset) {
            return Err(LoadError::tensor(path, name, format!("overlaps tensor '{other}'")));
        }
        before = Some((name, end));
    }
    Ok(())
}

/// GGML type codes. `Err` holds the name of a type that exists but is not read here.
fn dtype(code: u32) -> Result<DType, &'static str> {
    Ok(match code {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        12 => DType::Q4_K,
        13 => DType::Q5_K,
        14 => DType::Q6_K,
        30 => DType::BF16,
        9 => return Err("Q8_1"),
        10 => return Err("Q2_K"),
        11 => return Err("Q3_K"),
        15 => return Err("Q8_K"),
        16..=23 | 29 => return Err("an IQ type"),
        24..=28 => return Err("an integer or F64 type"),
        34 | 35 => return Err("a ternary type"),
        39 => return Err("MXFP4"),
        _ => return Err("an unknown type"),
    })
}
