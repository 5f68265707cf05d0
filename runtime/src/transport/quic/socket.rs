//! The UDP socket under QUIC: buffers, segments, and the place where faults are injected.
//!
//! quinn sends up to ten packets per system call. Ten of more than 6.5 KiB exceed the 64 KiB that
//! UDP segmentation offload can take; the kernel then refuses, and the packets vanish. So the
//! wrapper caps the packets per call to what fits.

use super::super::BindError;
use super::shim::ShimSocket;
use super::{QuicOptions, holder};
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime, UdpPoller};
use socket2::{Domain, Socket, Type};
use std::fmt::Debug;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Largest UDP payload over IPv4.
const MAX_DATAGRAM: usize = 65_507;

/// Puts a socket of its own around the real one: to drop, delay, duplicate or count datagrams.
pub trait SocketHook: Debug + Send + Sync + 'static {
    fn wrap(&self, inner: Arc<dyn AsyncUdpSocket>) -> Arc<dyn AsyncUdpSocket>;
}

/// A socket as the endpoint gets it, and the part of it that faults reach.
pub(super) struct Opened {
    pub socket: Arc<dyn AsyncUdpSocket>,
    pub shim: Option<Arc<ShimSocket>>,
}

pub(super) fn open(
    address: SocketAddr,
    listen: &str,
    options: &QuicOptions,
) -> Result<Opened, BindError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse => BindError::InUse {
            address: listen.to_owned(),
            holder: holder::of_udp_port(address.port()),
        },
        _ => BindError::Socket { address: listen.to_owned(), detail: error.to_string() },
    };
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None).map_err(failed)?;
    if address.is_ipv6() {
        // One socket for both families; where the system forbids it, IPv6 alone.
        let _ = socket.set_only_v6(false);
    }
    // Too small buffers lose packets in bursts. The system may grant less; that is no error.
    let _ = socket.set_recv_buffer_size(options.socket_buffer);
    let _ = socket.set_send_buffer_size(options.socket_buffer);
    socket.bind(&address.into()).map_err(failed)?;
    let socket = quinn::TokioRuntime.wrap_udp_socket(socket.into()).map_err(failed)?;
    let shim = options.wire.as_ref().map(|wire| wire.socket(socket.clone()));
    let socket = match &shim {
        Some(shim) => shim.clone(),
        None => socket,
    };
    let socket = match &options.hook {
        Some(hook) => hook.wrap(socket),
        None => socket,
    };
    let segments = (MAX_DATAGRAM / usize::from(options.max_udp_payload.max(1200))).max(1);
    Ok(Opened { socket: Arc::new(CappedSocket { inner: socket, segments }), shim })
}

#[derive(Debug)]
struct CappedSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    segments: usize,
}

impl AsyncUdpSocket for CappedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.inner.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        self.inner.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments().min(self.segments)
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}
