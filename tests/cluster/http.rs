//! A client that sees everything a stream holds: HTTP/1.1 over a socket, one connection a request.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use serde_json::Value;

use crate::harness::{PATIENCE, wait_until};

/// All that a client gets for one request.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub retry_after: Option<u64>,
    pub text: String,
    pub tokens: Vec<String>,
    pub logprobs: Vec<Value>,
    /// Where in the text each token begins.
    pub offsets: Vec<u64>,
    pub finishes: Vec<String>,
    pub usage: Vec<Value>,
    /// Error events, a broken connection, or the body of a refusal.
    pub errors: Vec<Value>,
    /// How often `[DONE]` was said.
    pub done: usize,
}

impl Answer {
    /// Panics unless the stream is whole: one finish, one usage that counts its tokens, no error.
    pub fn check(&self, what: &str, tokens: usize) {
        assert_eq!((self.status, &self.errors), (200, &Vec::new()), "{what}: {self:?}");
        assert_eq!((&self.finishes[..], self.done), (&["length".to_string()][..], 1), "{what}");
        assert_eq!(self.tokens.len(), tokens, "{what}: {self:?}");
        assert_eq!(self.usage.len(), 1, "{what}: {self:?}");
        let count = |field: &str| self.usage[0][field].as_u64().unwrap_or(u64::MAX);
        assert_eq!(count("completion_tokens"), tokens as u64, "{what}: {:?}", self.usage);
        assert!(count("prompt_tokens") > 0, "{what}");
        let total = count("prompt_tokens") + count("completion_tokens");
        assert_eq!(count("total_tokens"), total, "{what}");
    }

    /// Panics unless both clients read the same, to the last bit.
    pub fn check_same(&self, other: &Answer, what: &str) {
        assert_eq!(self.text, other.text, "{what}: text");
        assert_eq!(self.tokens, other.tokens, "{what}: tokens");
        assert_eq!(self.offsets, other.offsets, "{what}: positions");
        assert_eq!(self.logprobs, other.logprobs, "{what}: log probabilities");
        assert_eq!(self.finishes, other.finishes, "{what}: finish");
        assert_eq!(self.prompt_tokens(), other.prompt_tokens(), "{what}: prompt tokens");
    }

    pub fn prompt_tokens(&self) -> usize {
        let counted = self.usage.first().and_then(|usage| usage["prompt_tokens"].as_u64());
        usize::try_from(counted.expect("a stream has a usage")).expect("small")
    }

    pub fn error_code(&self) -> &str {
        self.errors.first().and_then(|error| error["code"].as_str()).unwrap_or("")
    }

    fn take(&mut self, event: &Value) {
        if let Some(error) = event.get("error") {
            self.errors.push(error.clone());
        }
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            self.usage.push(usage.clone());
        }
        let choice = &event["choices"][0];
        self.text.push_str(choice["text"].as_str().unwrap_or_default());
        self.finishes.extend(choice["finish_reason"].as_str().map(str::to_string));
        let list = |name: &str| choice["logprobs"][name].as_array().cloned().unwrap_or_default();
        let names = list("tokens");
        self.tokens.extend(names.iter().filter_map(|name| Some(name.as_str()?.to_string())));
        self.logprobs.extend(list("token_logprobs"));
        self.offsets.extend(list("text_offset").iter().filter_map(Value::as_u64));
    }
}

/// A request that has been sent.
pub struct Stream {
    socket: Option<TcpStream>,
    lines: Option<BufReader<Body>>,
    pub answer: Answer,
}

impl Stream {
    /// Sends a request to `/v1/completions` and does not wait for an answer.
    pub fn open(port: u16, body: &Value) -> Stream {
        let socket = send(port, "POST", "/v1/completions", &body.to_string());
        let mut answer = Answer::default();
        let socket = match socket {
            Ok(socket) => Some(socket),
            Err(error) => {
                answer.errors.push(error.to_string().into());
                None
            }
        };
        Stream { socket, lines: None, answer }
    }

    /// Takes up what comes next; `false` after the end.
    pub fn step(&mut self) -> bool {
        match self.try_step() {
            Ok(more) => more,
            Err(error) => {
                self.answer.errors.push(format!("the connection broke: {error}").into());
                self.lines = None;
                false
            }
        }
    }

    /// Reads until the client has `count` tokens.
    pub fn until(&mut self, count: usize) {
        while self.answer.tokens.len() < count {
            assert!(self.step(), "ended before token {count}: {:?}", self.answer);
        }
    }

    pub fn finish(mut self) -> Answer {
        while self.step() {}
        self.answer
    }

    fn try_step(&mut self) -> Result<bool, Error> {
        if let Some(socket) = self.socket.take() {
            let (status, retry_after, body) = head(socket)?;
            self.answer.status = status;
            self.answer.retry_after = retry_after;
            let mut body = BufReader::new(body);
            if status != 200 {
                let mut text = String::new();
                body.read_to_string(&mut text)?;
                let value: Value = serde_json::from_str(&text).unwrap_or_default();
                self.answer.errors.push(value["error"].clone());
                return Ok(false);
            }
            self.lines = Some(body);
        }
        let Some(lines) = &mut self.lines else { return Ok(false) };
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 {
            self.lines = None;
            return Ok(false);
        }
        match line.trim_end().strip_prefix("data: ") {
            Some("[DONE]") => self.answer.done += 1,
            Some(data) => self.answer.take(&serde_json::from_str(data)?),
            None => {}
        }
        Ok(true)
    }
}

/// A stream that a thread of its own reads.
pub struct Reader {
    seen: Arc<AtomicUsize>,
    left: Arc<AtomicBool>,
    thread: JoinHandle<Answer>,
}

impl Reader {
    pub fn start(port: u16, body: Value) -> Reader {
        let seen = Arc::new(AtomicUsize::new(0));
        let left = Arc::new(AtomicBool::new(false));
        let (count, leave) = (seen.clone(), left.clone());
        let thread = std::thread::spawn(move || {
            let mut stream = Stream::open(port, &body);
            while !leave.load(Ordering::Relaxed) && stream.step() {
                count.store(stream.answer.tokens.len(), Ordering::Relaxed);
            }
            stream.answer
        });
        Reader { seen, left, thread }
    }

    /// Waits until each reader has `count` tokens.
    pub fn all_have(readers: &[Reader], count: usize) {
        wait_until(&format!("{count} tokens in every stream"), || {
            readers.iter().all(|reader| reader.seen.load(Ordering::Relaxed) >= count)
        });
    }

    pub fn ended(&self) -> bool {
        self.thread.is_finished()
    }

    pub fn finish(self) -> Answer {
        self.thread.join().expect("a reader does not panic")
    }

    /// Goes away; returns what was read.
    pub fn abandon(self) -> Answer {
        self.left.store(true, Ordering::Relaxed);
        self.finish()
    }
}

/// Status and body; an error if nobody listens.
pub fn get(port: u16, path: &str) -> Result<(u16, String), Error> {
    let (status, _, mut body) = head(send(port, "GET", path, "")?)?;
    let mut text = String::new();
    body.read_to_string(&mut text)?;
    Ok((status, text))
}

fn send(port: u16, method: &str, path: &str, body: &str) -> Result<TcpStream, Error> {
    let mut socket = TcpStream::connect(("127.0.0.1", port))?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    socket.write_all(request.as_bytes())?;
    Ok(socket)
}

fn head(socket: TcpStream) -> Result<(u16, Option<u64>, Body), Error> {
    let mut inner = BufReader::new(socket);
    let mut line = String::new();
    inner.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| Error::new(ErrorKind::UnexpectedEof, "no status line"))?;
    let (mut chunked, mut retry_after) = (false, None);
    loop {
        line.clear();
        inner.read_line(&mut line)?;
        let lower = line.trim_end().to_ascii_lowercase();
        match lower.split_once(": ") {
            Some(("transfer-encoding", "chunked")) => chunked = true,
            Some(("retry-after", seconds)) => retry_after = seconds.parse().ok(),
            Some(_) => {}
            None => {
                return Ok((status, retry_after, Body { inner, chunked, left: 0, ended: false }));
            }
        }
    }
}

/// A response's body without its framing. One that is cut off is an error, not an end.
struct Body {
    inner: BufReader<TcpStream>,
    chunked: bool,
    /// Bytes of the current chunk.
    left: usize,
    ended: bool,
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        if !self.chunked {
            return self.inner.read(buffer);
        }
        if self.left == 0 && !self.ended {
            let mut line = String::new();
            self.inner.read_line(&mut line)?;
            let size = usize::from_str_radix(line.trim_end(), 16);
            let bad = |_| Error::new(ErrorKind::UnexpectedEof, format!("chunk size {line:?}"));
            self.left = size.map_err(bad)?;
            self.ended = self.left == 0;
        }
        if self.ended {
            return Ok(0);
        }
        let most = self.left.min(buffer.len());
        let count = self.inner.read(&mut buffer[..most])?;
        if count == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the body was cut off"));
        }
        self.left -= count;
        if self.left == 0 {
            self.inner.read_line(&mut String::new())?;
        }
        Ok(count)
    }
}
