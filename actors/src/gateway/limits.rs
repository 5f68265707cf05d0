//! Every bound of the HTTP side, in one place. docs/limits.md lists them.

use std::time::Duration;

#[derive(Debug, Clone)]
pub struct Limits {
    /// Largest request body, in bytes; larger is 413.
    pub body_bytes: usize,
    /// Most answers (prompts times `n`) of one HTTP request.
    pub max_choices: u32,
    /// Most alternatives per position in `logprobs`.
    pub max_logprobs: u32,
    pub max_logit_bias: usize,
    /// Most chat messages of one request.
    pub max_messages: usize,
    /// Longest stop string, in bytes: it is how much text may be held back.
    pub stop_bytes: usize,
    /// From acceptance to the terminal event.
    pub deadline: Duration,
    /// How long the router may take to accept or refuse.
    pub submit: Duration,
    /// How long a streamed request waits for its first token before it sends its headers: until
    /// then a failure is an HTTP status, afterwards an event in the stream.
    pub first_event: Duration,
    /// An SSE comment is sent after this long without an event.
    pub keep_alive: Duration,
    /// How long after an answer's end its token counts may take to arrive.
    pub settle: Duration,
    /// For reading a request's head, and how long an idle connection stays open.
    pub head_read: Duration,
    pub body_read: Duration,
    /// A client that takes nothing for this long while there is something to send is gone.
    pub write_stall: Duration,
    /// Open connections; more wait in the listen queue.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 4 << 20,
            max_choices: 128,
            max_logprobs: 20,
            max_logit_bias: 1024,
            max_messages: 4096,
            stop_bytes: 1024,
            deadline: Duration::from_secs(600),
            submit: Duration::from_secs(10),
            first_event: Duration::from_secs(1),
            keep_alive: Duration::from_secs(15),
            settle: Duration::from_secs(1),
            head_read: Duration::from_secs(60),
            body_read: Duration::from_secs(30),
            write_stall: Duration::from_secs(120),
            connections: 8192,
        }
    }
}
