//! Connections: accepting, serving HTTP/1.1 on each, and ending them well.

use super::http::{Shared, routes};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;

/// How long connections have to end once the server closes.
const CLOSE: Duration = Duration::from_secs(5);

/// Serves until `closing` is true, then lets every connection end its current response. Dropping
/// the future drops all connections, and with them their work.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>, mut closing: watch::Receiver<bool>) {
    let app = routes(shared.clone());
    let permits = Arc::new(Semaphore::new(shared.limits.connections));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = closed(&mut closing) => break,
            Some(_) = connections.join_next() => {}
            accepted = accept(&listener, &permits) => match accepted {
                Ok((stream, permit)) => {
                    let stream = Stalling::new(stream, shared.limits.write_stall);
                    let head_read = shared.limits.head_read;
                    let ended = connection(stream, app.clone(), head_read, closing.clone());
                    connections.spawn(async move {
                        let _permit = permit;
                        ended.await;
                    });
                }
                Err(error) => {
                    // Usually out of file descriptors; closing connections will free some.
                    tracing::warn!(%error, "http: cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(CLOSE, all).await.is_err() {
        connections.shutdown().await;
    }
}

/// Returns once the server is to close, or its actor is gone.
async fn closed(closing: &mut watch::Receiver<bool>) {
    let _ = closing.wait_for(|closing| *closing).await;
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = permits.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    // A token is a small packet that somebody waits for. It fails only on a dead connection.
    let _ = stream.set_nodelay(true);
    Ok((stream, permit))
}

async fn connection(
    stream: Stalling,
    app: Router,
    head_read: Duration,
    mut closing: watch::Receiver<bool>,
) {
    let service = TowerToHyperService::new(app);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_read)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = closed(&mut closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // Clients come and go; what they left behind is cancelled by their guards.
        tracing::debug!(%error, "http: connection ended early");
    }
}

/// A socket on which a write that makes no progress for `limit` fails: its reader is gone.
struct Stalling {
    stream: TcpStream,
    limit: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Stalling {
    fn new(stream: TcpStream, limit: Duration) -> Self {
        Self { stream, limit, stalled: None }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stalled = None;
            return poll;
        }
        let limit = self.limit;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Stalling {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Stalling {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watch(cx, poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
