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
use crate::lane::{Draft, LaneIn, LaneOut};
use crate::transport::LinkError;
use bytes::Bytes;

/// The heartbeat lanes of a link, out and in.
pub(crate) type Lanes = (LaneOut, LaneIn);

async fn put(lane: &mut LaneOut, stamp: Stamp, frame: &Frame) -> Result<(), LinkError> {
    let head = frame::encode(stamp, frame);
    lane.send(vec![Draft { head, body: Bytes::new() }]).await
}
