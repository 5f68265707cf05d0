//! A fault with every draw made: what a resolved plan lists and a mode injects.

use dunlin_runtime::Site;
use serde::{Deserialize, Serialize};

/// Every kind that can be injected. `docs/faults.md` has a row for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    ProcessKill,
    ProcessStop,
    ProcessPause,
    ProcessSlow,
    ProcessStartFail,
    ActorPanic,
    ActorHang,
    ActorSlow,
    LinkPartition,
    LinkDelay,
    LinkLoss,
    LinkBandwidth,
    LinkClog,
    LinkRebind,
    ConnHalfOpen,
    StreamStall,
    FrameCorrupt,
    FrameTruncate,
    FrameDup,
    FrameStale,
    TimerLate,
    ClockJump,
    DeviceOom,
    DeviceLaunchError,
    DeviceHang,
    DeviceSlow,
    BitsKv,
    BitsWeight,
    LogitsNan,
    KvStale,
    KvSwap,
    ControlDupId,
    ControlSkew,
    ControlChurn,
    ClientDisconnect,
    ClientSlowReader,
    ClientBurst,
    ClientMalformed,
}

impl Kind {
    pub const ALL: [Kind; 38] = [
        Kind::ProcessKill,
        Kind::ProcessStop,
        Kind::ProcessPause,
        Kind::ProcessSlow,
        Kind::ProcessStartFail,
        Kind::ActorPanic,
        Kind::ActorHang,
        Kind::ActorSlow,
        Kind::LinkPartition,
        Kind::LinkDelay,
        Kind::LinkLoss,
        Kind::LinkBandwidth,
        Kind::LinkClog,
        Kind::LinkRebind,
        Kind::ConnHalfOpen,
        Kind::StreamStall,
        Kind::FrameCorrupt,
        Kind::FrameTruncate,
        Kind::FrameDup,
        Kind::FrameStale,
        Kind::TimerLate,
        Kind::ClockJump,
        Kind::DeviceOom,
        Kind::DeviceLaunchError,
        Kind::DeviceHang,
        Kind::DeviceSlow,
        Kind::BitsKv,
        Kind::BitsWeight,
        Kind::LogitsNan,
        Kind::KvStale,
        Kind::KvSwap,
        Kind::ControlDupId,
        Kind::ControlSkew,
        Kind::ControlChurn,
        Kind::ClientDisconnect,
        Kind::ClientSlowReader,
        Kind::ClientBurst,
        Kind::ClientMalformed,
    ];

    /// As plans spell it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::ProcessKill => "process.kill",
            Kind::ProcessStop => "process.stop",
            Kind::ProcessPause => "process.pause",
            Kind::ProcessSlow => "process.slow",
            Kind::ProcessStartFail => "process.start_fail",
            Kind::ActorPanic => "actor.panic",
            Kind::ActorHang => "actor.hang",
            Kind::ActorSlow => "actor.slow",
            Kind::LinkPartition => "link.partition",
            Kind::LinkDelay => "link.delay",
            Kind::LinkLoss => "link.loss",
            Kind::LinkBandwidth => "link.bandwidth",
            Kind::LinkClog => "link.clog",
            Kind::LinkRebind => "link.rebind",
            Kind::ConnHalfOpen => "conn.half_open",
            Kind::StreamStall => "stream.stall",
            Kind::FrameCorrupt => "frame.corrupt",
            Kind::FrameTruncate => "frame.truncate",
            Kind::FrameDup => "frame.dup",
            Kind::FrameStale => "frame.stale",
            Kind::TimerLate => "timer.late",
            Kind::ClockJump => "clock.jump",
            Kind::DeviceOom => "device.oom",
            Kind::DeviceLaunchError => "device.launch_error",
            Kind::DeviceHang => "device.hang",
            Kind::DeviceSlow => "device.slow",
            Kind::BitsKv => "bits.kv",
            Kind::BitsWeight => "bits.weight",
            Kind::LogitsNan => "logits.nan",
            Kind::KvStale => "kv.stale",
            Kind::KvSwap => "kv.swap",
            Kind::ControlDupId => "control.dup_id",
            Kind::ControlSkew => "control.skew",
            Kind::ControlChurn => "control.churn",
            Kind::ClientDisconnect => "client.disconnect",
            Kind::ClientSlowReader => "client.slow_reader",
            Kind::ClientBurst => "client.burst",
            Kind::ClientMalformed => "client.malformed",
        }
    }

    pub fn parse(name: &str) -> Option<Kind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = String::deserialize(from)?;
        let unknown = || serde::de::Error::custom(format!("no fault kind is called '{name}'"));
        Kind::parse(&name).ok_or_else(unknown)
    }
}

/// Where a plan is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Many nodes in one process, virtual time, one seed.
    Sim,
    /// Real node processes on this machine.
    Process,
}

/// One fault, concrete. All times are microseconds since the run's workload began.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    pub id: String,
    pub kind: Kind,
    pub target: Target,
    pub when: Trigger,
    /// How long it stays; `None` for what happens once (a kill) or stays to the heal phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lasts_us: Option<u64>,
    /// How often it fires at most, for kinds that hit single messages, frames, steps or starts.
    #[serde(default = "once")]
    pub times: u32,
    #[serde(default)]
    pub params: Params,
    #[serde(default)]
    pub expect: Expect,
}

fn once() -> u32 {
    1
}

/// What is hit. Names are the cluster file's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    Node(String),
    /// `role` is a mailbox role (`router`, `scheduler`, `shard`, `placement`, `agent`, `gateway`,
    /// `kv`), `instance` as in its address (empty: any).
    Actor {
        node: String,
        role: String,
        instance: String,
    },
    /// A shard by its place: the node is where it runs when the fault fires.
    Shard {
        replica: String,
        stage: usize,
        rank: usize,
    },
    /// Directed links.
    Links(Vec<(String, String)>),
    /// A request by its number in the workload; for client faults.
    Request(u64),
    /// The whole cluster, or its clients together.
    All,
}

/// When a fault begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trigger {
    At {
        us: u64,
    },
    /// Output token number `token` of the request (`None`: of any) was delivered.
    Token {
        request: Option<u64>,
        token: u32,
    },
    /// A scheduler planned step `step` (of any replica, unless named).
    Step {
        replica: Option<String>,
        step: u64,
    },
    /// The `nth` (from 1) fact of this name since the start; see `names` and `facts`.
    Event {
        name: String,
        nth: u64,
    },
    /// `delay_us` after another fault began or ended.
    After {
        fault: String,
        edge: Edge,
        delay_us: u64,
    },
    /// The `nth` (from 1) frame of protocol `message` leaves on one of these directed links (any
    /// link, if there is none). The fault is in force for that very frame.
    Message {
        links: Vec<(String, String)>,
        message: String,
        nth: u64,
    },
    /// The `nth` (from 1) time that a site of this name is reached; see [`site_is`].
    Site {
        site: String,
        nth: u64,
    },
}

/// Names of sites, as triggers spell them. A dot and a detail may follow: `message.shard` (the
/// actor's role), `frame.router` (the frame's protocol), `load.left` (the node), `step.r0` (the
/// replica), `start.left` (the node).
pub const SITES: [&str; 5] = ["start", "message", "frame", "load", "step"];

/// Is `site` the one that a trigger names?
pub fn site_is(name: &str, site: &Site<'_>) -> bool {
    let (of, detail) = match site {
        Site::Start { node } => ("start", node.as_str()),
        Site::Message { role, .. } => ("message", *role),
        Site::FrameOut { message, .. } => ("frame", *message),
        Site::Load { node, .. } => ("load", node.as_str()),
        Site::Step { replica, .. } => ("step", *replica),
    };
    match name.split_once('.') {
        Some((name, wanted)) => name == of && wanted == detail,
        None => name == of,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Edge {
    Start,
    End,
}

/// Numbers that kinds take; which kind reads which is in the catalogue.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Params {
    /// process.kill: signal name without SIG; default KILL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// process.slow, device.slow: how many times slower.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// link.delay, actor.slow, client.slow_reader: median and 99th percentile of a log-normal delay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<u64>,
    /// link.loss: chance per datagram (process) or frame (sim).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p: Option<f64>,
    /// link.bandwidth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<u64>,
    /// device.oom.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// clock.jump: signed, milliseconds. timer.late: at most so late.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ms: Option<i64>,
    /// frame.*, stream.stall: protocol of the frames (`scheduler`, `router`, `shard`, ... or `flow`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Which matching message, frame, step or start is hit first, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nth: Option<u64>,
    /// device.launch_error: stays until the process ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sticky: Option<bool>,
    /// bits.*, kv.*: where.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bit: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u64>,
    /// client.burst: requests at once. control.churn: how many times. client.disconnect: tokens that
    /// are read first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

/// What the plan's author says that clients must see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expect {
    /// Nothing but a pause: every stream ends well, with the right tokens.
    #[default]
    Masked,
    /// As `masked`; requests may have been handed out again.
    Retried,
    /// At most the request that was hit fails, once, with a code.
    FailedOnce,
    /// What was injected is refused and counted; clients see nothing.
    Refused,
    /// Requests may fail with a code while it lasts.
    Unavailable,
    /// Tokens may change; how many is reported.
    Measure,
}
