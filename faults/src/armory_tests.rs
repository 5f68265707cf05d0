use super::*;
use crate::fault::{Expect, Params, Trigger};
use dunlin_runtime::NodeName;
use dunlin_runtime::transport::LaneClass;

fn fault(kind: Kind, target: Target, times: u32, params: Params) -> Fault {
    let (id, when) = (kind.name().to_string(), Trigger::At { us: 0 });
    Fault { id, kind, target, when, lasts_us: None, times, params, expect: Expect::Masked }
}

fn name(name: &str) -> NodeName {
    NodeName::new(name).expect("a valid name")
}

fn step<'a>(node: &'a NodeName, stage: usize, requests: &'a [u64]) -> Site<'a> {
    Site::Step { node, replica: "r0", stage, rank: 0, epoch: 1, step: 5, requests }
}

fn frame<'a>(node: &'a NodeName, to: &'a NodeName, message: &'a str) -> Site<'a> {
    Site::FrameOut { node, to, lane: LaneClass::Mail, message }
}

#[test]
fn the_nth_match_and_the_ones_after_it_are_hit() {
    let (a, b) = (name("a"), name("b"));
    let params = Params { nth: Some(3), message: Some("scheduler".into()), ..Params::default() };
    let links = Target::Links(vec![("a".into(), "b".into())]);
    let mut armory = Armory::new(1);
    armory.arm(fault(Kind::FrameDup, links, 2, params));
    let mut hits = Vec::new();
    for at in 0..8 {
        assert_eq!(armory.decide(&frame(&b, &a, "scheduler")), None, "the other direction");
        assert_eq!(armory.decide(&frame(&a, &b, "shard")), None, "another protocol");
        if armory.decide(&frame(&a, &b, "scheduler")).is_some() {
            hits.push(at);
        }
    }
    assert_eq!(hits, [2, 3]);
    assert_eq!(armory.fired("frame.dup"), 2);
}

#[test]
fn what_sticks_to_a_device_ends_with_its_process() {
    let a = name("a");
    let params = Params { sticky: Some(true), ..Params::default() };
    let target = Target::Shard { replica: "r0".into(), stage: 1, rank: 0 };
    let mut armory = Armory::new(1);
    armory.arm(fault(Kind::DeviceLaunchError, target, 1, params));
    assert_eq!(armory.decide(&step(&a, 0, &[1])), None);
    assert!(armory.decide(&step(&a, 1, &[1])).is_some());
    let load = Site::Load { node: &a, device: "cpu", stage: 1, rank: 0 };
    assert!(armory.decide(&load).is_some(), "the device is still dead");
    armory.disarm("device.launch_error");
    assert!(armory.decide(&load).is_some(), "and a healed plan does not mend it");
    armory.process_ended("a");
    assert_eq!(armory.decide(&load), None);
}

#[test]
fn a_request_is_hit_under_the_id_it_has_inside() {
    let a = name("a");
    let mut armory = Armory::new(1);
    armory.name_request(7, 1007);
    armory.arm(fault(Kind::LogitsNan, Target::Request(7), 1, Params::default()));
    assert_eq!(armory.decide(&step(&a, 0, &[7, 8])), None);
    let hit = armory.decide(&step(&a, 0, &[8, 1007])).expect("a hit");
    assert_eq!(hit.action, Action::NotFinite { request: 1007 });
}

#[test]
fn slowness_is_a_multiple_of_the_shortest_step() {
    let a = name("a");
    let mut armory = Armory::new(1);
    let params = Params { factor: Some(3.0), ..Params::default() };
    armory.arm(fault(Kind::DeviceSlow, Target::Node("a".into()), 1, params));
    for value in [900, 500, 4000] {
        let (node, subject) = (a.clone(), "r0/0/0".to_string());
        armory.observe(&Fact { node, name: STEP_DONE, subject, key: 1, value });
    }
    for _ in 0..3 {
        let hit = armory.decide(&step(&a, 0, &[1])).expect("it lasts");
        assert_eq!(hit.action, Action::Delay(Duration::from_micros(1000)));
    }
}

#[test]
fn effects_prove_the_hits_of_their_node_in_order() {
    let a = name("a");
    let mut armory = Armory::new(1);
    armory.arm(fault(Kind::KvStale, Target::All, 1, Params::default()));
    armory.arm(fault(Kind::KvSwap, Target::All, 1, Params::default()));
    armory.decide(&step(&a, 0, &[1]));
    // Another shard: the next step of the same one would take the first hit back.
    armory.decide(&step(&a, 1, &[1]));
    let done = |node: &str| Fact {
        node: name(node),
        name: FAULT_DONE,
        subject: "done".into(),
        key: 0,
        value: 0,
    };
    assert_eq!(armory.observe(&done("b")), None);
    assert_eq!(armory.observe(&done("a")).as_deref(), Some("kv.stale"));
    assert_eq!(armory.observe(&done("a")).as_deref(), Some("kv.swap"));
    assert_eq!(armory.observe(&done("a")), None);
}

#[test]
fn a_hit_that_a_step_could_not_carry_out_does_not_count() {
    let (a, b) = (name("a"), name("b"));
    let mut armory = Armory::new(1);
    armory.arm(fault(Kind::BitsKv, Target::All, 1, Params::default()));
    assert!(armory.decide(&step(&a, 0, &[1])).is_some(), "nothing is written yet");
    assert_eq!(armory.decide(&step(&b, 1, &[1])), None, "another shard knows nothing of it");
    assert!(armory.decide(&step(&a, 0, &[1])).is_some(), "once more");
    let (node, subject) = (a.clone(), "flipped".to_string());
    armory.observe(&Fact { node, name: FAULT_DONE, subject, key: 0, value: 1 });
    assert_eq!(armory.decide(&step(&a, 0, &[1])), None);
    assert_eq!(armory.fired("bits.kv"), 1);
}
