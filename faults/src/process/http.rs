//! A client that sees everything an answer holds: HTTP/1.1 over a socket, one connection a request.
//!
//! By hand, so that it can read slowly, hang up anywhere, and send what no library would.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// A line of a head, or the size of a chunk.
const LINE_BYTES: u64 = 64 << 10;
/// A body that is read whole, and one chunk.
const BODY_BYTES: usize = 64 << 20;

/// An answer whose body is still to be read. Dropping it hangs up.
pub struct Answer {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    inner: BufReader<TcpStream>,
    chunked: bool,
    /// Bytes left of a body that is not chunked.
    left: Option<usize>,
    ended: bool,
}

/// Sends a request and reads the head of its answer.
///
/// # Errors
/// Nobody listens, the connection broke, or what came is not HTTP.
pub async fn ask(
    to: SocketAddr,
    (method, path): (&str, &str),
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Answer, Error> {
    let mut socket = TcpStream::connect(to).await?;
    socket.set_nodelay(true)?;
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n",
        body.len()
    );
    headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
    head.push_str("\r\n");
    socket.write_all(head.as_bytes()).await?;
    // A server may refuse before it has read all.
    let _ = socket.write_all(body).await;
    read_head(BufReader::new(socket)).await
}

/// Sends these bytes, whatever they are, and reads the head of what comes back.
///
/// # Errors
/// As [`ask`].
pub async fn send_raw(to: SocketAddr, bytes: &[u8]) -> Result<Answer, Error> {
    let mut socket = TcpStream::connect(to).await?;
    socket.write_all(bytes).await?;
    read_head(BufReader::new(socket)).await
}

async fn read_head(mut inner: BufReader<TcpStream>) -> Result<Answer, Error> {
    let bad = |what: &str| Error::new(ErrorKind::InvalidData, what.to_string());
    let first = read_line(&mut inner).await?;
    let status = first.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| bad("no status line"))?;
    let mut headers = BTreeMap::new();
    loop {
        let line = read_line(&mut inner).await?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').ok_or_else(|| bad("a header without a colon"))?;
        headers.insert(name.trim().to_ascii_lowercase(), value.trim().to_string());
    }
    let chunked = headers.get("transfer-encoding").is_some_and(|value| value == "chunked");
    let left = headers.get("content-length").and_then(|value| value.parse().ok());
    Ok(Answer { status, headers, inner, chunked, left, ended: false })
}

async fn read_line(from: &mut BufReader<TcpStream>) -> Result<String, Error> {
    let mut line = Vec::new();
    (&mut *from).take(LINE_BYTES).read_until(b'\n', &mut line).await?;
    if line.last() != Some(&b'\n') {
        return Err(Error::new(ErrorKind::UnexpectedEof, "the connection ended within a line"));
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_string())
}

impl Answer {
    /// The next piece of the body, `None` at its end. One that is cut off is an error, not an end.
    pub async fn piece(&mut self) -> Result<Option<Vec<u8>>, Error> {
        if self.ended {
            return Ok(None);
        }
        let cut = || Error::new(ErrorKind::UnexpectedEof, "the body was cut off");
        if self.chunked {
            let line = read_line(&mut self.inner).await?;
            let size = usize::from_str_radix(&line, 16).ok().filter(|size| *size <= BODY_BYTES);
            let size = size.ok_or_else(|| {
                Error::new(ErrorKind::InvalidData, format!("chunk size {line:?}"))
            })?;
            let mut bytes = vec![0; size];
            self.inner.read_exact(&mut bytes).await?;
            read_line(&mut self.inner).await?;
            self.ended = size == 0;
            return Ok((size > 0).then_some(bytes));
        }
        let mut bytes = vec![0; self.left.unwrap_or(16 << 10).min(16 << 10)];
        if bytes.is_empty() {
            self.ended = true;
            return Ok(None);
        }
        let count = self.inner.read(&mut bytes).await?;
        bytes.truncate(count);
        match (&mut self.left, count) {
            (Some(_), 0) => return Err(cut()),
            (Some(left), _) => *left = left.saturating_sub(count),
            (None, 0) => {
                self.ended = true;
                return Ok(None);
            }
            (None, _) => {}
        }
        Ok(Some(bytes))
    }

    /// The rest of the body.
    pub async fn text(mut self) -> Result<String, Error> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            all.extend(piece);
            if all.len() > BODY_BYTES {
                return Err(Error::new(ErrorKind::InvalidData, "the body is too large"));
            }
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    /// Bytes that have arrived and were not taken by this client yet.
    pub fn unread(&self) -> u64 {
        let held = self.inner.buffer().len() as u64;
        held + rustix::io::ioctl_fionread(self.inner.get_ref()).unwrap_or(0)
    }
}

/// Cuts a body into the data of its server-sent events, wherever the pieces break.
#[derive(Debug, Default)]
pub struct Events(Vec<u8>);

impl Events {
    /// The data of every event that is whole now.
    pub fn push(&mut self, piece: &[u8]) -> Vec<String> {
        self.0.extend_from_slice(piece);
        let mut found = Vec::new();
        while let Some(end) = self.0.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = self.0.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&event);
            let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
            let data: Vec<&str> = lines.collect();
            if !data.is_empty() {
                found.push(data.join("\n"));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_any_cut() {
        let text = b": hi\n\ndata: {\"a\":1}\n\ndata: x\ndata: y\n\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let mut events = Events::default();
            let got: Vec<String> = text.chunks(size).flat_map(|part| events.push(part)).collect();
            assert_eq!(got, ["{\"a\":1}", "x\ny", "[DONE]"], "pieces of {size}");
        }
    }
}
