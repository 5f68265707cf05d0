//! The socket that does what [`WireFaults`] say, between quinn and the real one.

use super::socket::SocketHook;
use super::wire::{Batch, Datagram, Shared, WireFaults};
use parking_lot::Mutex;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime, UdpPoller};
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::task::AbortHandle;
use tokio::time::Instant;

impl SocketHook for WireFaults {
    fn wrap(&self, inner: Arc<dyn AsyncUdpSocket>) -> Arc<dyn AsyncUdpSocket> {
        self.socket(inner)
    }
}

impl WireFaults {
    pub(super) fn socket(&self, inner: Arc<dyn AsyncUdpSocket>) -> Arc<ShimSocket> {
        let shared = self.0.clone();
        let sockets = Arc::new(Sockets { main: inner, other: Mutex::new(None) });
        let pump = tokio::spawn(pump(shared.clone(), sockets.clone())).abort_handle();
        Arc::new(ShimSocket { shared, sockets, reader: Mutex::new(None), pump })
    }
}

pub(super) struct ShimSocket {
    shared: Arc<Shared>,
    sockets: Arc<Sockets>,
    /// Of the endpoint's driver, to have it look at a new socket.
    reader: Mutex<Option<Waker>>,
    pump: AbortHandle,
}

struct Sockets {
    main: Arc<dyn AsyncUdpSocket>,
    /// From where moved connections send. They also receive there.
    other: Mutex<Option<Arc<dyn AsyncUdpSocket>>>,
}

impl ShimSocket {
    /// Opens another port to send from; returns it.
    pub fn open_other(&self) -> io::Result<u16> {
        let ip = self.sockets.main.local_addr()?.ip();
        let socket = UdpSocket::bind((ip, 0))?;
        let port = socket.local_addr()?.port();
        let socket = quinn::TokioRuntime.wrap_udp_socket(socket)?;
        *self.sockets.other.lock() = Some(socket);
        if let Some(reader) = self.reader.lock().take() {
            reader.wake();
        }
        Ok(port)
    }
}

impl Sockets {
    fn choose(&self, moved: bool) -> Arc<dyn AsyncUdpSocket> {
        let other = self.other.lock().clone().filter(|_| moved);
        other.unwrap_or_else(|| self.main.clone())
    }

    fn send(&self, datagram: &Datagram) -> io::Result<()> {
        self.choose(datagram.moved).try_send(&Transmit {
            destination: datagram.to,
            ecn: datagram.ecn,
            contents: &datagram.bytes,
            segment_size: None,
            src_ip: datagram.src_ip,
        })
    }
}

/// Sends what was held when it is due.
async fn pump(shared: Arc<Shared>, sockets: Arc<Sockets>) {
    let mut poller = sockets.main.clone().create_io_poller();
    loop {
        let due = shared.state.lock().next_due();
        tokio::select! {
            biased;
            _ = shared.changed.notified() => continue,
            _ = crate::link::until(due) => {}
        }
        loop {
            let Some(datagram) = shared.state.lock().take_due(Instant::now()) else { break };
            // Any other error is a datagram lost, as on any network.
            while let Err(error) = sockets.send(&datagram)
                && error.kind() == io::ErrorKind::WouldBlock
            {
                let writable = std::future::poll_fn(|cx| poller.as_mut().poll_writable(cx));
                if writable.await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
    }
}

impl AsyncUdpSocket for ShimSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.sockets.main.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        let (batch, due) = {
            let mut state = self.shared.state.lock();
            let before = state.next_due();
            let batch = state.send(transmit, Instant::now());
            (batch, state.next_due() != before)
        };
        if due {
            self.shared.changed.notify_one();
        }
        match batch {
            Batch::Send { moved: false } => self.sockets.main.try_send(transmit),
            Batch::Send { moved: true } => {
                // quinn waits for the main socket only; a full buffer here is a loss.
                let _ = self.sockets.choose(true).try_send(transmit);
                Ok(())
            }
            Batch::Done { now } => {
                now.iter().for_each(|datagram| drop(self.sockets.send(datagram)));
                Ok(())
            }
        }
    }

    fn poll_recv(
        &self,
        cx: &mut Context,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        *self.reader.lock() = Some(cx.waker().clone());
        let other = self.sockets.other.lock().clone();
        let mut received = self.sockets.main.poll_recv(cx, bufs, meta);
        if received.is_pending()
            && let Some(other) = other
        {
            received = other.poll_recv(cx, bufs, meta);
        }
        if let Poll::Ready(Ok(count)) = received {
            let mut state = self.shared.state.lock();
            for (buf, meta) in bufs.iter_mut().zip(meta.iter_mut()).take(count) {
                let (from, stride) = (meta.addr, meta.stride);
                meta.len = retain(buf, meta.len, stride, |bytes| state.receive(from, bytes));
            }
        }
        received
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.sockets.main.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.sockets.main.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.sockets.main.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.sockets.main.may_fragment()
    }
}

/// Closes the gaps that unwanted datagrams leave in a buffer of several; returns what is left.
fn retain(buf: &mut [u8], len: usize, stride: usize, mut keep: impl FnMut(&[u8]) -> bool) -> usize {
    let (mut read, mut write) = (0, 0);
    while read < len {
        let end = (read + stride.max(1)).min(len);
        if keep(&buf[read..end]) {
            buf.copy_within(read..end, write);
            write += end - read;
        }
        read = end;
    }
    write
}

impl Drop for ShimSocket {
    fn drop(&mut self) {
        self.pump.abort();
    }
}

impl std::fmt::Debug for ShimSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShimSocket({:?})", self.sockets.main)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn unwanted_datagrams_leave_no_gap() {
        let mut buf = *b"aabbccd--";
        assert_eq!(super::retain(&mut buf, 7, 2, |bytes| bytes != b"bb"), 5);
        assert_eq!(&buf[..5], b"aaccd");
        assert_eq!(super::retain(&mut buf, 5, 2, |_| false), 0);
    }
}
