use super::*;
use proptest::prelude::*;

fn stamp() -> Stamp {
    Stamp { cluster: 0x1122_3344_5566_7788, incarnation: Incarnation(42) }
}

fn counts() -> impl Strategy<Value = [u64; LANES]> {
    prop::array::uniform8(any::<u64>())
}

fn body() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from)
}

prop_compose! {
    fn hello()(
        cluster in ".{0,60}",
        node in "[a-z0-9-]{1,63}",
        dialled in "[a-z0-9-]{1,63}",
        numbers in prop::array::uniform4(any::<u64>()),
        schema in any::<u32>(),
        received in counts(),
    ) -> Hello {
        Hello {
            cluster,
            node: NodeName::new(&node).unwrap(),
            dialled: NodeName::new(&dialled).unwrap(),
            incarnation: Incarnation(numbers[0]),
            life: numbers[1],
            schema,
            out_session: numbers[2],
            in_session: numbers[3],
            received,
        }
    }
}

prop_compose! {
    fn target()(
        role in ".{0,40}", instance in ".{0,40}", protocol in ".{0,40}", version in any::<u16>()
    ) -> Target {
        Target { role, instance, protocol, version }
    }
}

fn outcome() -> impl Strategy<Value = Outcome> {
    use Code::*;
    let codes = vec![Ok, Decode, ActorDown, NoReply, Deadline, Overloaded, Version, TooBig, Encode];
    (prop::sample::select(codes), ".{0,60}").prop_map(|(code, detail)| Outcome { code, detail })
}

fn refusal() -> impl Strategy<Value = Refusal> {
    use RefusalCode::*;
    let codes = vec![
        ProtocolVersion,
        Cluster,
        Schema,
        Identity,
        UnknownNode,
        StaleIncarnation,
        Busy,
        Malformed,
    ];
    (prop::sample::select(codes), ".{0,60}", ".{0,60}").prop_map(|(code, ours, theirs)| Refusal {
        code,
        ours,
        theirs,
    })
}

fn content() -> impl Strategy<Value = Content> {
    prop_oneof![
        (target(), body()).prop_map(|(to, body)| Content::Cast { to, body }),
        (any::<u64>(), any::<u32>(), target(), body())
            .prop_map(|(id, deadline_ms, to, body)| Content::Call { id, deadline_ms, to, body }),
        (any::<u64>(), outcome(), body()).prop_map(|(id, outcome, body)| Content::Answer {
            id,
            outcome,
            body
        }),
        (target(), outcome()).prop_map(|(to, outcome)| Content::Undelivered { to, outcome }),
    ]
}

fn any_frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        hello().prop_map(Frame::Hello),
        hello().prop_map(Frame::Welcome),
        refusal().prop_map(Frame::Refuse),
        any::<u64>().prop_map(|out_session| Frame::Ready { out_session }),
        (0..LANES as u8).prop_map(|lane| Frame::OpenMail { lane }),
        (any::<u64>(), any::<u8>()).prop_map(|(flow, class)| Frame::OpenFlow { flow, class }),
        (any::<u64>(), counts()).prop_map(|(seq, received)| Frame::Ping { seq, received }),
        (any::<u64>(), any::<u32>(), counts()).prop_map(|(seq, lease_ms, received)| Frame::Pong {
            seq,
            lease_ms,
            received
        }),
        counts().prop_map(|received| Frame::Ack { received }),
        (any::<u64>(), content()).prop_map(|(seq, content)| Frame::Mail(Mail { seq, content })),
    ]
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(frame in any_frame()) {
        let bytes = encode(stamp(), &frame);
        prop_assert_eq!(decode(bytes), Ok((stamp(), frame)));
    }

    #[test]
    fn any_bytes_are_answered_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode(Bytes::from(bytes.clone()));
        let _ = read_flow(Bytes::from(bytes));
    }

    /// Closer to the truth than noise: one byte of a good frame changed, or its end cut off.
    #[test]
    fn a_damaged_frame_is_answered_without_panic(
        frame in any_frame(),
        at in any::<prop::sample::Index>(),
        value in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let good = encode(stamp(), &frame);
        let mut changed = good.to_vec();
        let at = at.index(changed.len());
        changed[at] = value;
        let _ = decode(Bytes::from(changed));
        let cut = cut.index(good.len());
        // A shorter body is another good frame; everything else must be refused.
        let has_body = matches!(&frame, Frame::Mail(mail)
            if !matches!(mail.content, Content::Undelivered { .. }));
        prop_assert!(decode(good.slice(..cut)).is_err() || has_body);
    }

    #[test]
    fn flow_frames_come_back(numbers in prop::array::uniform3(any::<u64>()), body in body()) {
        let mut bytes = flow_head(numbers[0], numbers[1], numbers[2]).to_vec();
        prop_assert_eq!(bytes.len(), FLOW_HEAD);
        bytes.extend_from_slice(&body);
        let read = read_flow(Bytes::from(bytes));
        prop_assert_eq!(read, Ok((numbers[0], numbers[1], numbers[2], body)));
    }
}

#[test]
fn another_version_is_named_before_anything_else_is_read() {
    let error = decode(Bytes::from_static(&[7, 0, 255])).unwrap_err();
    assert_eq!(error, FrameError::Version { ours: PROTOCOL_VERSION, theirs: 7 });
}

#[test]
fn a_hello_without_the_magic_is_none() {
    let hello = Hello {
        cluster: "lab".into(),
        node: NodeName::new("a").unwrap(),
        dialled: NodeName::new("b").unwrap(),
        incarnation: Incarnation(1),
        life: 2,
        schema: 3,
        out_session: 4,
        in_session: 5,
        received: [0; LANES],
    };
    let mut bytes = encode(stamp(), &Frame::Hello(hello)).to_vec();
    assert!(bytes.len() <= MAX_SMALL_FRAME);
    bytes[19] = b'X';
    assert_eq!(decode(Bytes::from(bytes)), Err(FrameError::Magic));
}

#[test]
fn long_texts_are_cut_at_a_character() {
    let detail = "é".repeat(400);
    let outcome = Outcome { code: Code::Decode, detail };
    let content = Content::Answer { id: 1, outcome, body: Bytes::new() };
    let bytes = encode(stamp(), &Frame::Mail(Mail { seq: 0, content }));
    assert!(bytes.len() <= MAX_MAIL_HEAD);
    let Ok((_, Frame::Mail(Mail { content: Content::Answer { outcome, .. }, .. }))) = decode(bytes)
    else {
        panic!("not an answer")
    };
    assert_eq!(outcome.detail, "é".repeat(256));
}
