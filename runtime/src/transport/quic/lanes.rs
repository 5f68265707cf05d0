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

fn chunks(frames: Vec<OutFrame>) -> Result<Vec<Bytes>, LinkError> {
    let mut chunks = Vec::with_capacity(4);
    let mut small = BytesMut::new();
    for frame in frames {
        let size = frame.len();
        let length = u32::try_from(size)
            .map_err(|_| LinkError::TooBig { size, limit: u32::MAX as usize })?;
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
    /// The rest of the last packet.
    chunk: Bytes,
    /// A frame, or its length, that came in parts.
    partial: BytesMut,
    /// Length of the frame that `partial` is, once known.
    want: Option<usize>,
}

impl QuicSource {
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, chunk: Bytes::new(), partial: BytesMut::new(), want: None }
    }

    /// A whole frame out of what has arrived. Nothing is lost if the caller stops in between.
    fn take(&mut self, limit: usize) -> Result<Option<Bytes>, LinkError> {
        if self.want.is_none() {
            let mut length = [0; LENGTH];
            if self.partial.is_empty() && self.chunk.len() >= LENGTH {
                self.chunk.copy_to_slice(&mut length);
            } else {
                let missing = LENGTH.saturating_sub(self.partial.len()).min(self.chunk.len());
                self.partial.put(self.chunk.split_to(missing));
                if self.partial.len() < LENGTH {
                    return Ok(None);
                }
                self.partial.copy_to_slice(&mut length);
                self.partial.clear();
            }
            let size = u32::from_le_bytes(length) as usize;
            if size > limit {
                return Err(LinkError::TooBig { size, limit });
            }
            self.want = Some(size);
        }
        let Some(want) = self.want else { return Ok(None) };
        if self.partial.is_empty() && self.chunk.len() >= want {
            self.want = None;
            return Ok(Some(self.chunk.split_to(want)));
        }
        if self.partial.is_empty() {
            self.partial = BytesMut::with_capacity(want.min(RESERVE));
        }
        let missing = (want - self.partial.len()).min(self.chunk.len());
        self.partial.put(self.chunk.split_to(missing));
        if self.partial.len() < want {
            return Ok(None);
        }
        self.want = None;
        Ok(Some(std::mem::take(&mut self.partial).freeze()))
    }
}

impl FrameSource for QuicSource {
    fn recv(&mut self, limit: usize) -> BoxFuture<'_, Result<Option<Bytes>, LinkError>> {
        Box::pin(async move {
            loop {
                if let Some(frame) = self.take(limit)? {
                    return Ok(Some(frame));
                }
                match self.stream.read_chunk(usize::MAX, true).await {
                    Ok(Some(chunk)) => self.chunk = chunk.bytes,
                    Ok(None) if self.partial.is_empty() && self.want.is_none() => return Ok(None),
                    Ok(None) => return Err(LinkError::Truncated),
                    Err(ReadError::ConnectionLost(error)) => return Err(down(&error)),
                    Err(_) => return Err(LinkError::Reset),
                }
            }
        })
    }
}
