//! Lanes between two processes of one machine: Unix sockets beside the connection.
//!
//! Through QUIC a frame crosses a machine's own loopback in some 110 µs, most of which is spent on
//! encryption, UDP and the threads that are woken for them; through a Unix socket in 40. A pipeline
//! of processes on one machine waits twice a token for such a frame, a tensor group 60 times, and
//! what mail costs is taken from what they compute. So where both ends of a connection are on one
//! machine, its lanes are sockets. Heartbeats stay on the connection, and its end is that of its
//! sockets.
//!
//! Nobody is told where the other end listens: both derive a name and a key of the listener from
//! the secrets of their TLS session (keying material exporters, RFC 8446, 7.5). On another machine
//! nobody listens under that name, and the lane is a QUIC stream as ever. The name can be seen in
//! /proc/net/unix, so whoever connects shows the key as well, and both ends ask the kernel for the
//! other's user.
//!
//! Nothing here wakes the runtime in the usual case. A sender writes by itself and a device thread
//! that waits for a frame sleeps in poll(2) on the socket: one wake-up a frame, where the runtime
//! between them makes it three. The runtime's poller is asked only while a task must wait.
//!
//! Frames are those of QUIC streams (`lanes.rs`). Two lengths are none: [`FINISHED`] ends a lane
//! cleanly, [`RESET`] not so. A socket that ends with neither has lost its process, and says so when
//! the connection is found dead, as a QUIC stream would: those who depend on it hear of that once.

use super::lanes::{Assembler, LONGEST, chunks};
use super::{BoxFuture, FrameSink, FrameSource, LinkError, QuicOptions, down};
use crate::options::ms;
use crate::transport::{BlockingSource, Late, OutFrame, Timely};
use bytes::{Buf, Bytes};
use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinHandle};

/// In place of a frame's length: no more frames come.
const FINISHED: u32 = LONGEST + 1;
/// Likewise: the lane ends, and what came of it may not be all.
const RESET: u32 = LONGEST + 2;
/// What the receiving end sends back when it stops reading.
const STOPPED: u8 = 1;

const LABEL: &[u8] = b"EXPORTER-dunlin local lanes";
const NAME: usize = 16;
const KEY: usize = 32;
/// Connections that have not shown the key yet; more wait in the kernel.
const GREETINGS: usize = 16;
/// Time to show it.
const GREETING: Duration = Duration::from_secs(1);
/// Read at once; more where a longer frame is under way.
const READ: usize = 16 << 10;
const READ_MOST: usize = 1 << 20;
/// The end of a connection may arrive so much later than the ends of its lanes.
const OVERTAKEN: Duration = Duration::from_millis(200);

/// The local lanes of one connection.
pub(super) struct LocalLanes {
    life: Life,
    theirs: Listener,
    open: Arc<Open>,
    most: usize,
    accepted: tokio::sync::Mutex<mpsc::Receiver<Arc<Socket>>>,
    task: AbortHandle,
}

/// The connection that sockets belong to.
#[derive(Clone)]
struct Life {
    connection: quinn::Connection,
    /// A peer that is dead is found to be within this time.
    patience: Duration,
}

/// Where one end listens.
struct Listener {
    address: SockAddr,
    key: [u8; KEY],
}

/// The sockets of a connection, to be ended with it; `None` when that was done.
struct Open(Mutex<Option<Vec<Weak<Socket>>>>);

impl LocalLanes {
    /// Listens for the peer of `connection`. `None` where that is not possible; its lanes are then
    /// QUIC streams.
    pub fn start(
        connection: &quinn::Connection,
        dialled: bool,
        options: &QuicOptions,
    ) -> Option<Self> {
        let ends = ["dialler", "accepter"].map(|end| Listener::of(connection, end.as_bytes()));
        let [Some(dialler), Some(accepter)] = ends else { return None };
        let (own, theirs) = if dialled { (dialler, accepter) } else { (accepter, dialler) };
        let listener = own.listen().inspect_err(|error| {
            tracing::debug!(%error, "no local lanes: cannot listen");
        });
        let listener = listener.ok()?;
        let open = Arc::new(Open(Mutex::new(Some(Vec::new()))));
        let (accepted, queue) = mpsc::channel(GREETINGS);
        let most = usize::try_from(options.streams).unwrap_or(usize::MAX);
        let patience = ms(options.idle_ms) * 2;
        let serve = serve(connection.clone(), listener, own.key, (open.clone(), most), accepted);
        Some(Self {
            life: Life { connection: connection.clone(), patience },
            theirs,
            open,
            most,
            accepted: tokio::sync::Mutex::new(queue),
            task: tokio::spawn(serve).abort_handle(),
        })
    }

    /// A lane to the peer, if it is on this machine and has room for one.
    pub fn open(&self) -> Option<Box<dyn FrameSink>> {
        // It may have opened as many and refuses what is over the limit, which nobody would hear.
        if self.life.is_over() || self.open.count() >= self.most / 2 {
            return None;
        }
        let socket = Arc::new(self.theirs.connect().ok()?);
        self.open.add(&socket);
        let (life, handle) = (self.life.clone(), Handle::current());
        Some(Box::new(LocalSink {
            socket,
            life,
            handle,
            rest: None,
            broken: false,
            finished: false,
        }))
    }

    /// The next lane that the peer opened; never ready if none can come any more.
    pub async fn accept(&self) -> Box<dyn FrameSource> {
        let Some(socket) = self.accepted.lock().await.recv().await else {
            return std::future::pending().await;
        };
        let (life, handle) = (self.life.clone(), Handle::current());
        let (frames, room) = (Assembler::default(), Vec::new());
        let reader = Reader { socket, frames, room, end: None };
        Box::new(LocalSource { reader, life, handle, waiter: None })
    }
}

impl Drop for LocalLanes {
    fn drop(&mut self) {
        self.task.abort();
        self.open.shut();
    }
}

impl Listener {
    fn of(connection: &quinn::Connection, end: &[u8]) -> Option<Self> {
        let mut secret = [0; NAME + KEY];
        connection.export_keying_material(&mut secret, LABEL, end).ok()?;
        let (name, key) = secret.split_at(NAME);
        let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        // A leading zero: a name of the kernel's own, no file that outlives the process (unix(7)).
        let address = SockAddr::unix(format!("\0dunlin-{name}")).ok()?;
        Some(Self { address, key: key.try_into().ok()? })
    }

    fn socket() -> io::Result<Socket> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }

    fn listen(&self) -> io::Result<UnixListener> {
        let socket = Self::socket()?;
        socket.bind(&self.address)?;
        socket.listen(GREETINGS as i32)?;
        UnixListener::from_std(socket.into())
    }

    fn connect(&self) -> io::Result<Socket> {
        let socket = Self::socket()?;
        // Never waits: where the listener's queue is full the lane is a QUIC stream.
        socket.connect(&self.address)?;
        if !is_own(&socket) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // There is room for so little.
        (&socket).write_all(&self.key)?;
        Ok(socket)
    }
}

/// Whether the other end is a process of the same user.
fn is_own(socket: &impl AsFd) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(socket);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Accepts lanes until the connection ends, then ends them all.
async fn serve(
    connection: quinn::Connection,
    listener: UnixListener,
    key: [u8; KEY],
    (open, most): (Arc<Open>, usize),
    accepted: mpsc::Sender<Arc<Socket>>,
) {
    let room = Arc::new(Semaphore::new(GREETINGS));
    let accept = async {
        loop {
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = listener.accept().await else {
                // Out of descriptors, say: that may pass.
                tokio::time::sleep(GREETING).await;
                continue;
            };
            if !is_own(&stream) || open.count() >= most {
                metrics::counter!("dunlin_frames_refused_total", "reason" => "local_lane")
                    .increment(1);
                continue;
            }
            let (accepted, open) = (accepted.clone(), open.clone());
            tokio::spawn(async move {
                if let Some(socket) = greeted(stream, key).await.map(Arc::new) {
                    open.add(&socket);
                    let _ = accepted.send(socket).await;
                }
                drop(permit);
            });
        }
    };
    tokio::select! {
        biased;
        _ = connection.closed() => {}
        () = accept => {}
    }
    open.shut();
}

/// The socket, if the other end shows the key in time.
async fn greeted(mut stream: UnixStream, key: [u8; KEY]) -> Option<Socket> {
    let mut shown = [0; KEY];
    let read = tokio::time::timeout(GREETING, stream.read_exact(&mut shown)).await;
    // In constant time, as it is for secrets.
    let differs = shown.iter().zip(&key).fold(0, |differs, (a, b)| differs | (a ^ b));
    if matches!(read, Ok(Ok(_))) && differs == 0 {
        // As it is: it stays non-blocking.
        return stream.into_std().ok().map(Socket::from);
    }
    metrics::counter!("dunlin_frames_refused_total", "reason" => "local_lane").increment(1);
    None
}

impl Open {
    fn add(&self, socket: &Arc<Socket>) {
        match &mut *self.0.lock() {
            Some(all) => {
                all.retain(|socket| socket.strong_count() > 0);
                all.push(Arc::downgrade(socket));
            }
            None => shut(socket),
        }
    }

    fn count(&self) -> usize {
        let all = self.0.lock();
        all.iter().flatten().filter(|socket| socket.strong_count() > 0).count()
    }

    /// Wakes whoever waits at either end of them; what has arrived can still be read.
    fn shut(&self) {
        let all = self.0.lock().take();
        all.iter().flatten().filter_map(Weak::upgrade).for_each(|socket| shut(&socket));
    }
}

fn shut(socket: &Socket) {
    let _ = socket.shutdown(std::net::Shutdown::Both);
}

impl Life {
    /// Why the connection ended, if it did by then.
    async fn over_by(&self, then: Instant) -> Option<LinkError> {
        let closed = tokio::time::timeout_at(then.into(), self.connection.closed()).await;
        closed.ok().map(|reason| down(&reason))
    }

    fn is_over(&self) -> bool {
        self.connection.close_reason().is_some()
    }
}

struct LocalSink {
    socket: Arc<Socket>,
    life: Life,
    handle: Handle,
    /// Writes what found no room. One batch at most: the next waits for it. So both ends may send
    /// before either reads, as ranks do that exchange what they have.
    rest: Option<JoinHandle<io::Result<()>>>,
    /// Nothing can be written any more.
    broken: bool,
    finished: bool,
}

impl FrameSink for LocalSink {
    fn send(&mut self, frames: Vec<OutFrame>) -> BoxFuture<'_, Result<(), LinkError>> {
        Box::pin(async move {
            let mut chunks = VecDeque::from(chunks(frames)?);
            let before = match &mut self.rest {
                Some(rest) => rest.await.unwrap_or_else(|error| Err(io::Error::other(error))),
                None => Ok(()),
            };
            self.rest = None;
            match before.and_then(|()| write(&self.socket, &mut chunks)) {
                Ok(()) => Ok(()),
                Err(error) if is_end(&error) => {
                    self.broken = true;
                    Err(self.why().await)
                }
                Err(_) => {
                    self.rest = Some(self.handle.spawn(write_all(self.socket.clone(), chunks)));
                    Ok(())
                }
            }
        })
    }

    fn finish(&mut self) {
        self.end(FINISHED);
    }
}

impl LocalSink {
    /// Why nothing can be written any more.
    async fn why(&self) -> LinkError {
        let mut told = [0];
        let (wait, error) = match (&*self.socket).read(&mut told) {
            Ok(1) => (OVERTAKEN, LinkError::Stopped),
            _ => (self.life.patience, LinkError::Reset),
        };
        self.life.over_by(Instant::now() + wait).await.unwrap_or(error)
    }

    /// Writes a last mark behind everything else.
    fn end(&mut self, mark: u32) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        // In the middle of a frame a mark would be taken for a part of it.
        if self.broken {
            return shut(&self.socket);
        }
        let mut mark = VecDeque::from([Bytes::copy_from_slice(&mark.to_le_bytes())]);
        let rest = self.rest.take();
        if rest.is_some() || write(&self.socket, &mut mark).is_err_and(|error| !is_end(&error)) {
            let socket = self.socket.clone();
            self.handle.spawn(async move {
                let whole = match rest {
                    Some(rest) => matches!(rest.await, Ok(Ok(()))),
                    None => true,
                };
                match whole {
                    true => drop(write_all(socket, mark).await),
                    false => shut(&socket),
                }
            });
        }
    }
}

impl Drop for LocalSink {
    fn drop(&mut self) {
        // Where the connection is over, its own reason is what the peer is to hear.
        if !self.life.is_over() {
            self.end(RESET);
        }
    }
}

/// Writes as much as there is room for; `WouldBlock` if some is left.
fn write(mut socket: &Socket, chunks: &mut VecDeque<Bytes>) -> io::Result<()> {
    while !chunks.is_empty() {
        // No more than the kernel takes at once, by far.
        let slices: Vec<_> = chunks.iter().take(64).map(|chunk| IoSlice::new(chunk)).collect();
        let mut written = match socket.write_vectored(&slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            written => written?,
        };
        while let Some(chunk) = chunks.front_mut() {
            let part = written.min(chunk.len());
            chunk.advance(part);
            written -= part;
            if !chunk.is_empty() {
                break;
            }
            chunks.pop_front();
        }
    }
    Ok(())
}

async fn write_all(socket: Arc<Socket>, mut chunks: VecDeque<Bytes>) -> io::Result<()> {
    loop {
        match write(&socket, &mut chunks) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            done => return done,
        }
        // With the runtime's poller only now: it would be woken whenever the other end reads.
        drop(polled(&socket, Interest::WRITABLE)?.writable().await?);
    }
}

/// The socket with the runtime's poller, until this is dropped.
fn polled(socket: &Arc<Socket>, interest: Interest) -> io::Result<AsyncFd<Arc<Socket>>> {
    // SAFETY: it is one open socket for as long as this lives, which shares in it.
    unsafe { AsyncFd::register_with_interest(socket.clone(), interest) }.map_err(io::Error::from)
}

struct LocalSource {
    reader: Reader,
    life: Life,
    handle: Handle,
    /// The socket with the runtime's poller, while tasks wait for it.
    waiter: Option<AsyncFd<Arc<Socket>>>,
}

struct Reader {
    socket: Arc<Socket>,
    frames: Assembler,
    /// For the next read.
    room: Vec<u8>,
    end: Option<End>,
}

/// How a lane ended.
#[derive(Clone, Copy)]
enum End {
    Clean,
    /// By then it is known whether the connection ended with it.
    Reset(Instant),
}

impl Reader {
    /// A frame out of what was read; `None` if more must be read, or the lane has ended.
    fn taken(&mut self, limit: usize) -> Result<Option<Bytes>, LinkError> {
        let end = match self.frames.take(limit.min(LONGEST as usize)) {
            Err(LinkError::TooBig { size, .. }) if size == FINISHED as usize => End::Clean,
            Err(LinkError::TooBig { size, .. }) if size == RESET as usize => {
                End::Reset(Instant::now() + OVERTAKEN)
            }
            taken => return taken,
        };
        self.end = Some(end);
        Ok(None)
    }

    /// Reads what there is; `WouldBlock` if that is nothing, `UnexpectedEof` at the end.
    fn read(&mut self) -> io::Result<()> {
        self.room.reserve(self.frames.missing().clamp(READ, READ_MOST));
        match rustix::io::read(&*self.socket, spare_capacity(&mut self.room))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            // Not to hold all that room for as long as a small message lives.
            few if few <= READ / 4 => {
                self.frames.chunk = Bytes::copy_from_slice(&self.room);
                self.room.clear();
            }
            _ => self.frames.chunk = std::mem::take(&mut self.room).into(),
        }
        Ok(())
    }
}

impl LocalSource {
    /// [`Reader::read`] for tasks.
    async fn read(&mut self) -> io::Result<()> {
        let waiter = match &mut self.waiter {
            Some(waiter) => waiter,
            none => {
                match self.reader.read() {
                    Err(error) if !is_end(&error) => {}
                    read => return read,
                }
                none.insert(polled(&self.reader.socket, Interest::READABLE)?)
            }
        };
        let mut ready = waiter.readable().await?;
        ready.try_io(|_| self.reader.read()).unwrap_or(Ok(()))
    }

    /// What `read` came to; an end is kept, to be told as often as it is asked for.
    fn note(&mut self, read: io::Result<()>) {
        if read.is_err_and(|error| is_end(&error)) {
            self.reader.end = Some(End::Reset(Instant::now() + self.life.patience));
        }
    }

    /// [`Reader::read`] for threads; `Ok(Err(Late))` if nothing came in time.
    fn read_until(&mut self, until: Instant) -> io::Result<Result<(), Late>> {
        loop {
            match self.reader.read() {
                Err(error) if !is_end(&error) => {}
                read => return read.map(Ok),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Err(Late));
            }
            // An error shows at the next read, and a signal ends no wait.
            let left = Timespec::try_from(left).ok();
            let _ = poll(&mut [PollFd::new(&*self.reader.socket, PollFlags::IN)], left.as_ref());
        }
    }
}

impl FrameSource for LocalSource {
    fn recv(&mut self, limit: usize) -> BoxFuture<'_, Result<Option<Bytes>, LinkError>> {
        Box::pin(async move {
            loop {
                match self.reader.end {
                    None => {}
                    Some(End::Clean) => return Ok(None),
                    Some(End::Reset(then)) => {
                        return Err(self.life.over_by(then).await.unwrap_or(LinkError::Reset));
                    }
                }
                if let Some(frame) = self.reader.taken(limit)? {
                    return Ok(Some(frame));
                }
                if self.reader.end.is_none() {
                    tokio::task::consume_budget().await;
                    let read = self.read().await;
                    self.note(read);
                }
            }
        })
    }

    fn blocking(&mut self) -> Option<&mut dyn BlockingSource> {
        Some(self)
    }
}

impl BlockingSource for LocalSource {
    fn recv_until(&mut self, limit: usize, until: Instant) -> Result<Timely, LinkError> {
        // The runtime would be woken for every frame.
        self.waiter = None;
        loop {
            match self.reader.end {
                None => {}
                Some(End::Clean) => return Ok(Ok(None)),
                Some(End::Reset(then)) => {
                    return match self.handle.block_on(self.life.over_by(then.min(until))) {
                        Some(error) => Err(error),
                        None if then <= until => Err(LinkError::Reset),
                        None => Ok(Err(Late)),
                    };
                }
            }
            if let Some(frame) = self.reader.taken(limit)? {
                return Ok(Ok(Some(frame)));
            }
            if self.reader.end.is_none() {
                match self.read_until(until) {
                    Ok(Err(Late)) => return Ok(Err(Late)),
                    Ok(Ok(())) => {}
                    Err(error) => self.note(Err(error)),
                }
            }
        }
    }
}

/// Whether an error is more than "not now".
fn is_end(error: &io::Error) -> bool {
    !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl Drop for LocalSource {
    fn drop(&mut self) {
        if self.reader.end.is_none() && !self.life.is_over() {
            // The sender looks for it when it finds the socket closed.
            let _ = (&*self.reader.socket).write(&[STOPPED]);
        }
    }
}
