//! The catalogue: one row for each kind of fault. What it hits and takes, where it can be
//! injected and by what, what proves it, what must come of it.
//!
//! Plans are checked against it, the swarm draws from it, docs/faults.md is compared with it.

use crate::fault::{Expect, Kind, Mode};

/// One kind.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub kind: Kind,
    pub hits: Hits,
    /// Parameters that it reads; every other one is refused.
    pub takes: &'static [Take],
    pub lasts: Lasts,
    /// It reads `times`.
    pub repeats: bool,
    pub modes: &'static [Mode],
    /// What carries it out, in each of the modes.
    pub injector: &'static str,
    /// What is read back to show that it took effect.
    pub proof: &'static str,
    /// Unless the plan says otherwise.
    pub expect: Expect,
    pub root: bool,
    /// Takes its node out of service while it lasts: the tolerance counts it.
    pub down: bool,
    /// Weight in a swarm that names no kinds; 0: only if named.
    pub weight: u32,
}

/// What a kind's targets are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hits {
    /// A node's process.
    Node,
    /// An actor: by role, or a shard.
    Actor,
    /// A shard's device, or a request on it.
    Shard,
    /// Directed links.
    Link,
    /// Requests of the workload, or all clients.
    Client,
}

/// How long a kind stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasts {
    /// It happens once; `for` is refused.
    Once,
    /// `for`, else to the heal phase.
    ToHeal,
    /// For a node that is killed: `for` is how long it stays away, else what its supervisor does.
    Away,
    /// It makes no sense without `for`.
    Needed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    pub param: Param,
    pub required: bool,
    /// What holds where the plan does not say, in words.
    pub default: &'static str,
}

/// A parameter, as plans spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Param {
    Signal,
    Factor,
    /// `delay = "5ms"` or `{ p50, p99, shape }`.
    Delay,
    P,
    BitsPerSecond,
    Bytes,
    Ms,
    Message,
    Nth,
    Sticky,
    Layer,
    Position,
    Bit,
    Index,
    Count,
}

impl Param {
    pub const ALL: [Param; 15] = [
        Param::Signal,
        Param::Factor,
        Param::Delay,
        Param::P,
        Param::BitsPerSecond,
        Param::Bytes,
        Param::Ms,
        Param::Message,
        Param::Nth,
        Param::Sticky,
        Param::Layer,
        Param::Position,
        Param::Bit,
        Param::Index,
        Param::Count,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Param::Signal => "signal",
            Param::Factor => "factor",
            Param::Delay => "delay",
            Param::P => "p",
            Param::BitsPerSecond => "bits_per_second",
            Param::Bytes => "bytes",
            Param::Ms => "ms",
            Param::Message => "message",
            Param::Nth => "nth",
            Param::Sticky => "sticky",
            Param::Layer => "layer",
            Param::Position => "position",
            Param::Bit => "bit",
            Param::Index => "index",
            Param::Count => "count",
        }
    }
}

/// The row of a kind.
pub fn row(kind: Kind) -> &'static Row {
    // Every kind has its row: a test walks the enum.
    ROWS.iter().find(|row| row.kind == kind).unwrap_or(&ROWS[0])
}

impl Row {
    pub fn takes(&self, param: Param) -> Option<&'static Take> {
        self.takes.iter().find(|take| take.param == param)
    }

    pub fn in_mode(&self, mode: Mode) -> bool {
        self.modes.contains(&mode)
    }
}

const fn need(param: Param) -> Take {
    Take { param, required: true, default: "" }
}

const fn may(param: Param, default: &'static str) -> Take {
    Take { param, required: false, default }
}

const BOTH: &[Mode] = &[Mode::Sim, Mode::Process];
const SIM: &[Mode] = &[Mode::Sim];
const NTH: Take = may(Param::Nth, "1");
const MESSAGE: Take = may(Param::Message, "any");
/// What most rows share; each says what differs.
const BASE: Row = Row {
    kind: Kind::ProcessKill,
    hits: Hits::Node,
    takes: &[],
    lasts: Lasts::ToHeal,
    repeats: false,
    modes: BOTH,
    injector: "",
    proof: "",
    expect: Expect::Masked,
    root: false,
    down: false,
    weight: 1,
};

pub static ROWS: [Row; 38] = [
    Row {
        takes: &[may(Param::Signal, "KILL")],
        lasts: Lasts::Away,
        injector: "drop the node's state; SIGKILL",
        proof: "no process and its exit status",
        down: true,
        weight: 4,
        ..BASE
    },
    Row {
        kind: Kind::ProcessStop,
        lasts: Lasts::Away,
        injector: "drain and leave; SIGTERM",
        proof: "clean exit",
        down: true,
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::ProcessPause,
        lasts: Lasts::Needed,
        injector: "schedule nothing of the node; SIGSTOP, SIGCONT",
        proof: "state T, or no event of the node",
        down: true,
        weight: 3,
        ..BASE
    },
    Row {
        kind: Kind::ProcessSlow,
        takes: &[need(Param::Factor)],
        injector: "site step: delay by the step's own time; SIGSTOP and SIGCONT in turns",
        proof: "measured step time",
        ..BASE
    },
    Row {
        kind: Kind::ProcessStartFail,
        lasts: Lasts::Once,
        repeats: true,
        injector: "the node is killed; site start: fail",
        proof: "the start was refused",
        down: true,
        ..BASE
    },
    Row {
        kind: Kind::ActorPanic,
        hits: Hits::Actor,
        takes: &[MESSAGE, NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site message: panic",
        proof: "the supervisor's event",
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::ActorHang,
        hits: Hits::Actor,
        takes: &[MESSAGE, NTH],
        lasts: Lasts::Needed,
        repeats: true,
        injector: "site message: never ready",
        proof: "age of the watchdog",
        ..BASE
    },
    Row {
        kind: Kind::ActorSlow,
        hits: Hits::Actor,
        takes: &[need(Param::Delay), MESSAGE, NTH],
        injector: "site message: delay",
        proof: "delayed messages",
        ..BASE
    },
    Row {
        kind: Kind::LinkPartition,
        hits: Hits::Link,
        injector: "drop in the network; drop at the UDP socket",
        proof: "dropped packets",
        down: true,
        weight: 3,
        ..BASE
    },
    Row {
        kind: Kind::LinkDelay,
        hits: Hits::Link,
        takes: &[need(Param::Delay)],
        injector: "delay in the network; queue at the UDP socket",
        proof: "delayed packets and measured round trip",
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::LinkLoss,
        hits: Hits::Link,
        takes: &[need(Param::P)],
        injector: "resend later; drop at the UDP socket",
        proof: "lost packets",
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::LinkBandwidth,
        hits: Hits::Link,
        takes: &[need(Param::BitsPerSecond)],
        injector: "token bucket",
        proof: "throughput",
        ..BASE
    },
    Row {
        kind: Kind::LinkClog,
        hits: Hits::Link,
        lasts: Lasts::Needed,
        injector: "hold everything, then let all go at once",
        proof: "held packets",
        down: true,
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::LinkRebind,
        lasts: Lasts::Once,
        injector: "drop what is in flight; another UDP source port",
        proof: "another port",
        ..BASE
    },
    Row {
        kind: Kind::ConnHalfOpen,
        hits: Hits::Link,
        lasts: Lasts::Needed,
        injector: "the peer's state vanishes in silence",
        proof: "frames that nobody answers",
        down: true,
        ..BASE
    },
    Row {
        kind: Kind::StreamStall,
        hits: Hits::Link,
        takes: &[MESSAGE],
        lasts: Lasts::Needed,
        injector: "frames of the class are held",
        proof: "held frames",
        down: true,
        ..BASE
    },
    Row {
        kind: Kind::FrameCorrupt,
        hits: Hits::Link,
        takes: &[MESSAGE, NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site frame: XOR one byte",
        proof: "the frame that was changed, and a refusal",
        expect: Expect::Refused,
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::FrameTruncate,
        hits: Hits::Link,
        takes: &[MESSAGE, NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site frame: cut",
        proof: "the frame that was cut, and a refusal",
        expect: Expect::Refused,
        ..BASE
    },
    Row {
        kind: Kind::FrameDup,
        hits: Hits::Link,
        takes: &[MESSAGE, NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site frame: twice",
        proof: "the frame that was sent twice",
        expect: Expect::Refused,
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::FrameStale,
        hits: Hits::Link,
        takes: &[MESSAGE, NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site frame: an earlier one again",
        proof: "the frame that was sent again",
        expect: Expect::Refused,
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::TimerLate,
        takes: &[need(Param::Ms)],
        modes: SIM,
        injector: "the executor fires timers late",
        proof: "late timers",
        ..BASE
    },
    Row {
        kind: Kind::ClockJump,
        takes: &[need(Param::Ms)],
        lasts: Lasts::Once,
        injector: "the node's wall clock",
        proof: "offset of the clock",
        ..BASE
    },
    Row {
        kind: Kind::DeviceOom,
        hits: Hits::Shard,
        takes: &[may(Param::Bytes, "1GiB"), NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site load or step: out of memory",
        proof: "the device's error",
        ..BASE
    },
    Row {
        kind: Kind::DeviceLaunchError,
        hits: Hits::Shard,
        takes: &[NTH, may(Param::Sticky, "false")],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site step: fail",
        proof: "the device's error",
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::DeviceHang,
        hits: Hits::Shard,
        takes: &[NTH],
        repeats: true,
        injector: "site step: never done",
        proof: "age of the step",
        ..BASE
    },
    Row {
        kind: Kind::DeviceSlow,
        hits: Hits::Shard,
        takes: &[need(Param::Factor)],
        injector: "site step: delay by the step's own time",
        proof: "measured step time",
        ..BASE
    },
    Row {
        kind: Kind::BitsKv,
        hits: Hits::Shard,
        takes: &[
            NTH,
            may(Param::Layer, "drawn"),
            may(Param::Position, "drawn"),
            may(Param::Bit, "drawn"),
        ],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site step: flip a bit of a KV entry",
        proof: "the bit, read back",
        expect: Expect::Measure,
        weight: 0,
        ..BASE
    },
    Row {
        kind: Kind::BitsWeight,
        hits: Hits::Shard,
        takes: &[NTH, may(Param::Index, "drawn"), may(Param::Bit, "drawn")],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site load or step: flip a bit of a weight",
        proof: "the bit, read back",
        expect: Expect::Measure,
        weight: 0,
        ..BASE
    },
    Row {
        kind: Kind::LogitsNan,
        hits: Hits::Shard,
        takes: &[NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site step, last stage: NaN logits",
        proof: "the value, read back",
        expect: Expect::FailedOnce,
        weight: 0,
        ..BASE
    },
    Row {
        kind: Kind::KvStale,
        hits: Hits::Shard,
        takes: &[NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site step: lose a block's write",
        proof: "the block table differs",
        expect: Expect::Measure,
        weight: 0,
        ..BASE
    },
    Row {
        kind: Kind::KvSwap,
        hits: Hits::Shard,
        takes: &[NTH],
        lasts: Lasts::Once,
        repeats: true,
        injector: "site step: exchange two blocks",
        proof: "the block table differs",
        expect: Expect::Measure,
        weight: 0,
        ..BASE
    },
    Row {
        kind: Kind::ControlDupId,
        injector: "a second node of the same name joins",
        proof: "a hello was refused",
        expect: Expect::Refused,
        ..BASE
    },
    Row {
        kind: Kind::ControlSkew,
        injector: "a peer of another version joins",
        proof: "a hello was refused",
        expect: Expect::Refused,
        ..BASE
    },
    Row {
        kind: Kind::ControlChurn,
        takes: &[may(Param::Count, "3"), may(Param::Delay, "300ms between two")],
        lasts: Lasts::Once,
        injector: "the node's links are lost and made again and again; SIGKILL and restart",
        proof: "peers that went down and up",
        down: true,
        ..BASE
    },
    Row {
        kind: Kind::ClientDisconnect,
        hits: Hits::Client,
        takes: &[may(Param::Count, "at once")],
        lasts: Lasts::Once,
        injector: "the load generator leaves",
        proof: "the connection is closed",
        weight: 2,
        ..BASE
    },
    Row {
        kind: Kind::ClientSlowReader,
        hits: Hits::Client,
        takes: &[need(Param::Delay)],
        injector: "the load generator waits between two reads",
        proof: "reads that waited",
        ..BASE
    },
    Row {
        kind: Kind::ClientBurst,
        hits: Hits::Client,
        takes: &[may(Param::Count, "16")],
        lasts: Lasts::Once,
        injector: "the load generator sends many requests at once",
        proof: "requests that were sent",
        ..BASE
    },
    Row {
        kind: Kind::ClientMalformed,
        hits: Hits::Client,
        takes: &[may(Param::Count, "1")],
        lasts: Lasts::Once,
        injector: "the load generator sends what is no request",
        proof: "refusals with a code",
        expect: Expect::Refused,
        ..BASE
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_one_row_with_an_injector_and_a_proof() {
        for kind in Kind::ALL {
            let rows: Vec<&Row> = ROWS.iter().filter(|row| row.kind == kind).collect();
            assert_eq!(rows.len(), 1, "{} has {} rows", kind.name(), rows.len());
            let row = rows[0];
            assert!(!row.injector.is_empty() && !row.proof.is_empty(), "{}", kind.name());
            assert!(!row.modes.is_empty(), "{} can be injected nowhere", kind.name());
            assert!(!row.root, "{}: nothing here may need root", kind.name());
            assert!(!row.repeats || row.lasts != Lasts::Away, "{}", kind.name());
        }
        assert_eq!(row(Kind::KvSwap).kind, Kind::KvSwap);
    }

    #[test]
    fn required_parameters_have_no_default_and_the_others_do() {
        for row in &ROWS {
            for take in row.takes {
                let named = format!("{} {}", row.kind.name(), take.param.name());
                assert_eq!(take.required, take.default.is_empty(), "{named}");
            }
        }
    }
}
