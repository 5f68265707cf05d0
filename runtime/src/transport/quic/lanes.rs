//! Frames on QUIC streams: `u32` length, little endian, then the frame.
//!
//! Small frames are gathered into one chunk; bodies from [`COPY_BELOW`] on go to QUIC as they
//! are. On the way in, a frame within one packet is a slice of it; a longer one is put together
//! once.

use super::{super::OutFrame, BoxFuture, FrameSink, FrameSource, LinkError, down};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use quinn::{ReadError, RecvStream, SendStream, WriteError};

/// Below this a copy is cheaper than another chunk.
const COPY_BELOW: usize = 1024;
/// Taken at once for a frame under way; a longer one must arrive to get more.
const RESERVE: usize = 4 << 20;
const LENGTH: usize = 4;
/// Bytes of a frame at most; greater lengths mean something else where lanes are sockets.
pub(super) const LONGEST: u32 = u32::MAX - 2;

pub(super) struct QuicSink {
    stream: SendStream,
    finished: bool,
}

impl QuicSink {
    pub fn new(stream: SendStream) -> Self {
        Self { stream, finished: false }
    }
}

impl FrameSink for QuicSink {
    fn send(&mut self, frames: Vec<OutFrame>) -> BoxFuture<'_, Result<(), LinkError>> {
        Box::pin(async move {
            let mut chunks = chunks(frames)?;
            self.stream.write_all_chunks(&mut chunks).await.map_err(|error| match error {
                WriteError::Stopped(_) => LinkError::Stopped,
                WriteError::ConnectionLost(error) => down(&error),
                WriteError::ClosedStream | WriteError::ZeroRttRejected => LinkError::Reset,
            })
        })
    }

    fn finish(&mut self) {
        self.finished = true;
        let _ = self.stream.finish();
    }
}

impl Drop for QuicSink {
    fn drop(&mut self) {
        if !self.finished {
            // quinn would finish it, and half a frame would look like a clean end.
            let _ = self.stream.reset(0u32.into());
        }
    }
}

/// Frames as they are written.
pub(super) fn chunks(frames: Vec<OutFrame>) -> Result<Vec<Bytes>, LinkError> {
    let mut chunks = Vec::with_capacity(4);
    let mut small = BytesMut::new();
    for frame in frames {
        let size = frame.len();
        let length = u32::try_from(size).ok().filter(|length| *length <= LONGEST);
        let length = length.ok_or(LinkError::TooBig { size, limit: LONGEST as usize })?;
        small.put_u32_le(length);
        small.put_slice(&frame.head);
        if frame.body.len() < COPY_BELOW {
            small.put_slice(&frame.body);
        } else {
            chunks.push(small.split().freeze());
            chunks.push(frame.body);
        }
    }
    if !small.is_empty() {
        chunks.push(small.freeze());
    }
    Ok(chunks)
}

pub(super) struct QuicSource {
    stream: RecvStream,
    frames: Assembler,
}

impl QuicSource {
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, frames: Assembler::default() }
    }
}

impl FrameSource for QuicSource {
    fn recv(&mut self, limit: usize) -> BoxFuture<'_, Result<Option<Bytes>, LinkError>> {
        Box::pin(async move {
            loop {
                if let Some(frame) = self.frames.take(limit)? {
                    return Ok(Some(frame));
                }
                match self.stream.read_chunk(usize::MAX, true).await {
                    Ok(Some(chunk)) => self.frames.chunk = chunk.bytes,
                    Ok(None) if self.frames.is_empty() => return Ok(None),
                    Ok(None) => return Err(LinkError::Truncated),
                    Err(ReadError::ConnectionLost(error)) => return Err(down(&error)),
                    Err(_) => return Err(LinkError::Reset),
                }
            }
        })
    }
}

/// Puts frames together from chunks that are cut anywhere. Pure.
#[derive(Default)]
pub(super) struct Assembler {
    /// The rest of the last chunk.
    pub chunk: Bytes,
    /// A frame, or its length, that came in parts.
    partial: BytesMut,
    /// Length of the frame that `partial` is, once known.
    want: Option<usize>,
}

impl Assembler {
    fn is_empty(&self) -> bool {
        self.chunk.is_empty() && self.partial.is_empty() && self.want.is_none()
    }

    /// How many bytes the frame under way is short of, as far as is known.
    #[cfg(target_os = "linux")]
    pub fn missing(&self) -> usize {
        self.want.map_or(0, |want| want.saturating_sub(self.partial.len()))
    }

    /// A whole frame out of what has arrived; `None` if another chunk is needed.
    pub fn take(&mut self, limit: usize) -> Result<Option<Bytes>, LinkError> {
        let want = match self.want {
            Some(want) => want,
            None => {
                let Some(size) = self.take_length() else { return Ok(None) };
                if size > limit {
                    return Err(LinkError::TooBig { size, limit });
                }
                self.want = Some(size);
                size
            }
        };
        if self.partial.is_empty() {
            if self.chunk.len() >= want {
                self.want = None;
                return Ok(Some(self.chunk.split_to(want)));
            }
            self.partial = BytesMut::with_capacity(want.min(RESERVE));
        }
        if !self.fill(want) {
            return Ok(None);
        }
        self.want = None;
        Ok(Some(std::mem::take(&mut self.partial).freeze()))
    }

    fn take_length(&mut self) -> Option<usize> {
        let mut length = [0; LENGTH];
        if self.partial.is_empty() && self.chunk.len() >= LENGTH {
            self.chunk.copy_to_slice(&mut length);
        } else {
            if !self.fill(LENGTH) {
                return None;
            }
            self.partial.copy_to_slice(&mut length);
            self.partial.clear();
        }
        Some(u32::from_le_bytes(length) as usize)
    }

    /// Moves bytes from the chunk until `partial` has `size`; whether it has.
    fn fill(&mut self, size: usize) -> bool {
        let missing = size.saturating_sub(self.partial.len()).min(self.chunk.len());
        self.partial.put(self.chunk.split_to(missing));
        self.partial.len() >= size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Vec<(Vec<u8>, Vec<u8>)>> {
        let size = prop_oneof![0..40usize, 1000..1050usize, 3000..9000usize];
        let bytes = size.prop_flat_map(|n| prop::collection::vec(any::<u8>(), n));
        prop::collection::vec((prop::collection::vec(any::<u8>(), 0..60), bytes), 0..12)
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(frames in frames(), cuts in prop::collection::vec(1usize..2000, 1..50)) {
            let out = frames.iter().map(|(head, body)| OutFrame {
                head: Bytes::from(head.clone()),
                body: Bytes::from(body.clone()),
            });
            let mut wire = Bytes::from(chunks(out.collect()).unwrap().concat());
            let (mut assembler, mut got) = (Assembler::default(), Vec::new());
            let mut cuts = cuts.into_iter().cycle();
            loop {
                while let Some(frame) = assembler.take(1 << 20).unwrap() {
                    got.push(frame.to_vec());
                }
                if wire.is_empty() {
                    break;
                }
                let size = cuts.next().unwrap_or(1).min(wire.len());
                assembler.chunk = wire.split_to(size);
            }
            let sent: Vec<_> = frames.into_iter().map(|(head, body)| [head, body].concat()).collect();
            prop_assert_eq!(got, sent);
            prop_assert!(assembler.is_empty());
        }

        #[test]
        fn any_bytes_are_answered_within_bounds(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..50), 0..20),
        ) {
            let mut assembler = Assembler::default();
            'all: for part in parts {
                assembler.chunk = Bytes::from(part);
                loop {
                    match assembler.take(100) {
                        Ok(Some(frame)) => prop_assert!(frame.len() <= 100),
                        Ok(None) => break,
                        Err(LinkError::TooBig { size, limit: 100 }) => {
                            prop_assert!(size > 100);
                            break 'all;
                        }
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                prop_assert!(assembler.partial.capacity() <= 4096);
            }
        }
    }
}
