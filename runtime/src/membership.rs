//! Whom to believe: judges hellos. Pure.
//!
//! Invariants: one live incarnation per node name; a higher one takes over at once; a lower one is
//! refused and never comes back. Of two processes with the same number (a node's folder was copied,
//! and both were started in one second) the first stays: the other is refused for as long as the
//! first has its link or may resume its session, which is longer than a lease. Of two links between
//! the same two lives one is kept, and both ends keep the same: that of the smaller name, unless
//! it has gone silent.

use crate::address::{Incarnation, NodeName};
use crate::frame::{Hello, PROTOCOL_VERSION, Refusal, RefusalCode};
use crate::mutation::mutated;

/// This node, as it presents itself.
#[derive(Debug, Clone)]
pub(crate) struct Me {
    pub name: NodeName,
    pub cluster: String,
    pub incarnation: Incarnation,
    pub life: u64,
    pub schema: u32,
}

/// The highest life of a peer seen so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Life {
    pub incarnation: Incarnation,
    pub nonce: u64,
}

/// What stands between this node and a peer when the peer's hello comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Situation {
    Apart,
    /// This node dialled, is connected, and waits for the answer to its own hello.
    Greeting,
    Linked {
        dialled_by_me: bool,
        heard_ms_ago: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    SameLife,
    NewLife,
}

/// A link that was heard so recently is not given up for the peer's dial.
const FRESH_MS: u64 = 500;

/// Is the peer who it claims, of our cluster, and speaking our language?
pub(crate) fn check(
    me: &Me,
    hello: &Hello,
    proven: &[String],
    dialled: Option<&NodeName>,
) -> Result<(), Refusal> {
    let differ = |code, ours: String, theirs: String| Err(Refusal { code, ours, theirs });
    if hello.cluster != me.cluster {
        return differ(RefusalCode::Cluster, me.cluster.clone(), hello.cluster.clone());
    }
    if hello.schema != me.schema {
        return differ(RefusalCode::Schema, me.schema.to_string(), hello.schema.to_string());
    }
    if !proven.iter().any(|name| name == hello.node.as_str()) {
        let ours = format!("certificate for {}", proven.join(", "));
        return differ(RefusalCode::Identity, ours, format!("claims {}", hello.node));
    }
    if dialled.is_some_and(|name| *name != hello.node) {
        let ours = dialled.map(|name| format!("dialled {name}")).unwrap_or_default();
        return differ(RefusalCode::Identity, ours, format!("is {}", hello.node));
    }
    if hello.dialled != me.name {
        let ours = format!("is {}", me.name);
        return differ(RefusalCode::Identity, ours, format!("dialled {}", hello.dialled));
    }
    if hello.node == me.name {
        let ours = format!("{} {}", me.name, me.incarnation);
        return differ(RefusalCode::StaleIncarnation, ours, format!("claims {}", hello.node));
    }
    Ok(())
}

/// May this life of the peer have the link? `held`: the known life has it, or may resume it.
/// `situation` matters only between the same two lives.
pub(crate) fn admit(
    me: &Me,
    known: Option<Life>,
    held: bool,
    situation: Situation,
    hello: &Hello,
) -> Result<Admission, Refusal> {
    let Some(known) = known else { return Ok(Admission::NewLife) };
    if hello.incarnation > known.incarnation {
        return Ok(Admission::NewLife);
    }
    let ours = || format!("knows {} {}", hello.node, known.incarnation);
    let theirs = format!("is {} {}", hello.node, hello.incarnation);
    if hello.incarnation < known.incarnation {
        return Err(Refusal { code: RefusalCode::StaleIncarnation, ours: ours(), theirs });
    }
    if hello.life != known.nonce && !mutated("reuse-incarnation") {
        if !held {
            return Ok(Admission::NewLife);
        }
        let theirs = format!("{theirs}, another process");
        return Err(Refusal { code: RefusalCode::Twin, ours: ours(), theirs });
    }
    let mine_wins = me.name < hello.node;
    let keep = match situation {
        Situation::Apart => false,
        Situation::Greeting => mine_wins,
        Situation::Linked { dialled_by_me, heard_ms_ago } => {
            mine_wins && dialled_by_me && heard_ms_ago < FRESH_MS
        }
    };
    if keep {
        let ours = format!("dialled by {}", me.name);
        let theirs = format!("dialled by {}", hello.node);
        return Err(Refusal { code: RefusalCode::Busy, ours, theirs });
    }
    Ok(Admission::SameLife)
}

/// The refusal for a hello whose frame this node cannot read.
pub(crate) fn refuse_frame(error: &crate::frame::FrameError) -> Refusal {
    match error {
        crate::frame::FrameError::Version { theirs, .. } => Refusal {
            code: RefusalCode::ProtocolVersion,
            ours: PROTOCOL_VERSION.to_string(),
            theirs: theirs.to_string(),
        },
        other => Refusal {
            code: RefusalCode::Malformed,
            ours: "expected a hello".into(),
            theirs: other.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::LANES;

    fn name(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn me(who: &str) -> Me {
        Me {
            name: name(who),
            cluster: "lab".into(),
            incarnation: Incarnation(3),
            life: 1,
            schema: 1,
        }
    }

    fn hello(from: &str, to: &str) -> Hello {
        Hello {
            cluster: "lab".into(),
            node: name(from),
            dialled: name(to),
            incarnation: Incarnation(5),
            life: 9,
            schema: 1,
            out_session: 1,
            in_session: 0,
            received: [0; LANES],
        }
    }

    #[test]
    fn each_difference_is_refused_by_its_name() {
        let proven = vec!["b".to_string()];
        let check = |change: fn(&mut Hello), proven: &[String]| {
            let mut hello = hello("b", "a");
            change(&mut hello);
            check(&me("a"), &hello, proven, Some(&name("b"))).map_err(|r| (r.code, r.to_string()))
        };
        assert_eq!(check(|_| {}, &proven), Ok(()));
        type Case = (fn(&mut Hello), RefusalCode, &'static str);
        let cases: [Case; 5] = [
            (|h| h.cluster = "home".into(), RefusalCode::Cluster, "here lab, there home"),
            (|h| h.schema = 2, RefusalCode::Schema, "here 1, there 2"),
            (|h| h.node = name("c"), RefusalCode::Identity, "certificate for b, there claims c"),
            (|h| h.dialled = name("z"), RefusalCode::Identity, "is a, there dialled z"),
            (|h| h.node = name("a"), RefusalCode::Identity, "claims a"),
        ];
        for (change, code, text) in cases {
            let (got, message) = check(change, &proven).unwrap_err();
            assert_eq!(got, code);
            assert!(message.contains(text), "{message}");
        }
        let both = vec!["b".to_string(), "c".to_string()];
        let (code, message) = check(|h| h.node = name("c"), &both).unwrap_err();
        assert_eq!(code, RefusalCode::Identity);
        assert!(message.contains("dialled b, there is c"), "{message}");
    }

    #[test]
    fn a_higher_incarnation_takes_over_and_an_older_never_returns() {
        let known = |n, nonce| Some(Life { incarnation: Incarnation(n), nonce });
        let linked = Situation::Linked { dialled_by_me: true, heard_ms_ago: 0 };
        let admit = |known, held, situation| {
            admit(&me("a"), known, held, situation, &hello("b", "a")).map_err(|r| r.code)
        };
        for situation in [Situation::Apart, Situation::Greeting, linked] {
            for held in [false, true] {
                let admit = |known| admit(known, held, situation);
                assert_eq!(admit(None), Ok(Admission::NewLife));
                assert_eq!(admit(known(4, 9)), Ok(Admission::NewLife));
                assert_eq!(admit(known(6, 9)), Err(RefusalCode::StaleIncarnation));
            }
            // Of twins the first stays, until it is gone for good.
            assert_eq!(admit(known(5, 8), true, situation), Err(RefusalCode::Twin));
            assert_eq!(admit(known(5, 8), false, situation), Ok(Admission::NewLife));
        }
        assert_eq!(admit(known(5, 9), true, Situation::Apart), Ok(Admission::SameLife));
    }

    #[test]
    fn of_two_links_both_ends_keep_the_smaller_names() {
        let known = Some(Life { incarnation: Incarnation(5), nonce: 9 });
        // Both dialled at once: `a` refuses b's dial, `c` takes it.
        let greeting = |who| admit(&me(who), known, true, Situation::Greeting, &hello("b", who));
        assert_eq!(greeting("a").unwrap_err().code, RefusalCode::Busy);
        assert_eq!(greeting("c"), Ok(Admission::SameLife));
        // A live link that `a` dialled stands; a silent one gives way, and so does any of b's.
        let linked = |who, dialled_by_me, heard_ms_ago| {
            let situation = Situation::Linked { dialled_by_me, heard_ms_ago };
            admit(&me(who), known, true, situation, &hello("b", who)).map_err(|r| r.code)
        };
        assert_eq!(linked("a", true, 10), Err(RefusalCode::Busy));
        assert_eq!(linked("a", true, 900), Ok(Admission::SameLife));
        assert_eq!(linked("a", false, 10), Ok(Admission::SameLife));
        assert_eq!(linked("c", true, 10), Ok(Admission::SameLife));
    }
}
