//! Aligned buffers, and how much memory the machine has.

use dunlin_backend::BackendError;
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of every buffer: a cache line, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// From this size on, a buffer asks for huge pages if it was made to be streamed.
const HUGE: usize = 4 << 20;

/// Plain data for which all bits zero is a value.
///
/// # Safety
/// Implement only for such types, without padding that matters and aligned to at most [`ALIGN`].
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: zero bits are 0.0.
unsafe impl Plain for f32 {}
// SAFETY: zero bits are 0.
unsafe impl Plain for u8 {}

/// A zeroed buffer aligned to [`ALIGN`]. Large ones are backed by memory only where touched.
pub(crate) struct Buf<T: Plain> {
    base: NonNull<u8>,
    layout: Layout,
    ptr: *mut T,
    len: usize,
}

// SAFETY: the buffer owns its memory and T is plain data.
unsafe impl<T: Plain + Send> Send for Buf<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Plain + Sync> Sync for Buf<T> {}

impl<T: Plain> Buf<T> {
    /// A buffer of nothing, which takes no memory.
    pub const fn empty() -> Self {
        Self {
            base: NonNull::dangling(),
            layout: Layout::new::<()>(),
            ptr: NonNull::<T>::dangling().as_ptr(),
            len: 0,
        }
    }

    /// `len` zeroed elements for `what`; `streamed` buffers ask for huge pages.
    pub fn new(len: usize, what: &str, streamed: bool) -> Result<Self, BackendError> {
        let refuse = |need: usize| BackendError::OutOfMemory {
            device: "cpu".into(),
            what: what.to_owned(),
            need: need as u64,
            free: free_bytes(),
        };
        // The allocator zeroes lazily (calloc) only for ordinary alignments, so align by hand.
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|n| n.checked_add(ALIGN))
            .ok_or_else(|| refuse(usize::MAX))?;
        let layout = Layout::from_size_align(bytes, 8).map_err(|_| refuse(bytes))?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
            .ok_or_else(|| refuse(bytes))?;
        let skip = base.as_ptr().align_offset(ALIGN);
        // SAFETY: `skip < ALIGN`, which the allocation has room for.
        let ptr = unsafe { base.as_ptr().add(skip) }.cast();
        if streamed && bytes >= HUGE {
            advise_huge(base.as_ptr(), bytes);
        }
        Ok(Self { base, layout, ptr, len })
    }

    pub fn as_ptr(&self) -> *const T {
        self.ptr
    }

    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Makes room for `len` elements; what was in the buffer is lost when it grows.
    pub fn ensure(&mut self, len: usize, what: &str) -> Result<(), BackendError> {
        if len > self.len {
            *self = Self::new(len.max(self.len + self.len / 2), what, false)?;
        }
        Ok(())
    }
}

impl<T: Plain> std::ops::Deref for Buf<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised elements.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<T: Plain> std::ops::DerefMut for Buf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` initialised elements, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<T: Plain> Drop for Buf<T> {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated with this layout in `new`.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
        }
    }
}

/// Hands out pieces of large chunks, so that weights lie on huge pages however small each is:
/// streaming them is then a third faster.
#[derive(Default)]
pub(crate) struct Arena {
    chunk: Option<Arc<Buf<u8>>>,
    used: usize,
}

/// What a chunk holds. Memory is touched piece by piece, so a half-used chunk costs half.
const CHUNK: usize = 32 << 20;

/// Bytes of a chunk, which lives as long as any of its pieces.
pub(crate) struct Piece {
    chunk: Arc<Buf<u8>>,
    offset: usize,
    len: usize,
}

impl Arena {
    /// `len` zeroed bytes, aligned to [`ALIGN`], for `what`.
    pub fn take(&mut self, len: usize, what: &str) -> Result<Piece, BackendError> {
        if len > CHUNK / 4 {
            let chunk = Arc::new(Buf::new(len, what, true)?);
            return Ok(Piece { chunk, offset: 0, len });
        }
        let chunk = match self.chunk.take().filter(|c| len <= c.len() - self.used) {
            Some(chunk) => chunk,
            None => {
                self.used = 0;
                Arc::new(Buf::new(CHUNK, what, true)?)
            }
        };
        let offset = self.used;
        self.used = (offset + len).next_multiple_of(ALIGN);
        self.chunk = Some(chunk.clone());
        Ok(Piece { chunk, offset, len })
    }
}

impl Piece {
    /// For writing through `&mut self`: no other piece has these bytes.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_ptr().cast_mut()
    }

    pub fn as_ptr(&self) -> *const u8 {
        self.chunk.as_ptr().wrapping_add(self.offset)
    }
}

impl std::ops::Deref for Piece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes of the chunk, written only through `&mut self`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }
}

/// Huge pages spare the translation buffer when weights are streamed. Advice: failure is fine.
#[cfg(target_os = "linux")]
fn advise_huge(base: *mut u8, bytes: usize) {
    const PAGE: usize = 4096;
    let skip = base.align_offset(PAGE);
    if bytes > skip + PAGE {
        // SAFETY: whole pages inside an allocation of ours; the advice does not change contents.
        unsafe {
            let len = (bytes - skip) / PAGE * PAGE;
            libc::madvise(base.add(skip).cast(), len, libc::MADV_HUGEPAGE);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: *mut u8, _: usize) {}

/// Bytes that new buffers may take: `MemAvailable` where the system says it.
pub(crate) fn free_bytes() -> u64 {
    meminfo("MemAvailable:").unwrap_or(UNKNOWN)
}

/// Bytes of memory in the machine.
pub(crate) fn total_bytes() -> u64 {
    meminfo("MemTotal:").unwrap_or(UNKNOWN)
}

/// Where the system does not say, plan for a small machine.
const UNKNOWN: u64 = 8 << 30;

fn meminfo(key: &str) -> Option<u64> {
    field(&std::fs::read_to_string("/proc/meminfo").ok()?, key)
}

/// The value of `key` in bytes; the file counts in KiB.
fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero() {
        for len in [0, 1, 17, 4096, 3 << 20] {
            let b = Buf::<f32>::new(len, "test", true).unwrap();
            assert_eq!(b.as_ptr() as usize % ALIGN, 0);
            assert!(b.len() == len && b.iter().all(|x| *x == 0.0));
        }
        assert!(matches!(
            Buf::<f32>::new(usize::MAX / 2, "test", false),
            Err(BackendError::OutOfMemory { .. })
        ));
    }

    #[test]
    fn pieces_are_apart_and_outlive_the_arena() {
        let mut arena = Arena::default();
        let mut pieces = Vec::new();
        for (i, len) in [1, 64, 100, CHUNK / 4, CHUNK / 4, CHUNK, CHUNK / 4, CHUNK / 4, 7]
            .into_iter()
            .enumerate()
        {
            let mut piece = arena.take(len, "test").unwrap();
            assert_eq!(piece.as_ptr() as usize % ALIGN, 0);
            assert!(piece.len() == len && piece.iter().all(|b| *b == 0));
            // SAFETY: the piece has `len` bytes.
            unsafe { std::slice::from_raw_parts_mut(piece.as_mut_ptr(), len).fill(i as u8 + 1) };
            pieces.push(piece);
        }
        drop(arena);
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.iter().all(|b| *b == i as u8 + 1));
        }
    }

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       2048 kB\nMemAvailable:   17 kB\n";
        assert_eq!(field(text, "MemTotal:"), Some(2048 * 1024));
        assert_eq!(field(text, "MemAvailable:"), Some(17 * 1024));
        assert_eq!(field("MemTotal: many kB", "MemTotal:"), None);
        assert_eq!(field("", "MemTotal:"), None);
    }
}
