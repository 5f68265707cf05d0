//! Links: dialling, the hello, and the tasks that move frames while a link is up.
//!
//! This module decides nothing about whom to trust (`membership.rs`) or what a message means
//! (`node.rs`).

mod accept;
mod dial;
mod run;

pub(crate) use accept::accept;
pub(crate) use dial::{keep_linked, until};
pub(crate) use run::run;

use crate::frame::{self, Frame, Stamp};
use crate::transport::{FrameSink, FrameSource, LinkError, OutFrame};
use bytes::Bytes;

type Lanes = (Box<dyn FrameSink>, Box<dyn FrameSource>);

async fn put(sink: &mut Box<dyn FrameSink>, stamp: Stamp, frame: &Frame) -> Result<(), LinkError> {
    let head = frame::encode(stamp, frame);
    sink.send(vec![OutFrame { head, body: Bytes::new() }]).await
}
