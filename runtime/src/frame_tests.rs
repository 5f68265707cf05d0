use super::*;
use proptest::prelude::*;

/// The whole frame as it travels.
fn sealed(frame: &Frame, number: u64) -> Bytes {
    let mut head = encode(stamp(), frame);
    seal(&mut head, &[], number);
    head.freeze()
}

fn content_of(frame: &Frame) -> Bytes {
    encode(stamp(), frame).freeze().slice(ENVELOPE..)
}

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
        Twin,
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
    fn what_was_encoded_is_decoded(frame in any_frame(), number in any::<u64>()) {
        let (counted, content) = open(sealed(&frame, number)).unwrap();
        prop_assert_eq!(counted, number);
        prop_assert_eq!(decode(content), Ok((stamp(), frame)));
    }

    #[test]
    fn any_bytes_are_answered_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = open(Bytes::from(bytes.clone()));
        let _ = decode(Bytes::from(bytes.clone()));
        let _ = message_of(&bytes);
        let _ = read_flow(Bytes::from(bytes));
    }

    /// Closer to the truth than noise: one byte of a good frame changed, or its end cut off.
    #[test]
    fn a_damaged_frame_is_refused(
        frame in any_frame(),
        at in any::<prop::sample::Index>(),
        mask in 1u8..,
        cut in any::<prop::sample::Index>(),
    ) {
        let good = sealed(&frame, 7);
        let mut changed = good.to_vec();
        let at = at.index(changed.len());
        changed[at] ^= mask;
        let error = open(Bytes::from(changed)).unwrap_err();
        let named = matches!(error, FrameError::Checksum { .. } | FrameError::Version { .. });
        prop_assert!(named, "{error}");
        prop_assert!(open(good.slice(..cut.index(good.len()))).is_err());
    }

    /// Past the checksum, as a peer with a fault of its own would send it.
    #[test]
    fn damaged_content_is_answered_without_panic(
        frame in any_frame(),
        at in any::<prop::sample::Index>(),
        value in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let good = content_of(&frame);
        let mut changed = good.to_vec();
        let at = at.index(changed.len());
        changed[at] = value;
        let _ = message_of(&changed);
        let _ = decode(Bytes::from(changed));
        let cut = cut.index(good.len());
        // A shorter body is another good frame; everything else must be refused.
        let has_body = matches!(&frame, Frame::Mail(mail)
            if !matches!(mail.content, Content::Undelivered { .. }));
        prop_assert!(decode(good.slice(..cut)).is_err() || has_body);
    }

    #[test]
    fn flow_frames_come_back(numbers in prop::array::uniform3(any::<u64>()), body in body()) {
        let mut head = flow_head(numbers[0], numbers[1], numbers[2]);
        prop_assert_eq!(head.len(), ENVELOPE + FLOW_HEAD);
        seal(&mut head, &body, 3);
        head.extend_from_slice(&body);
        let (number, content) = open(head.freeze()).unwrap();
        prop_assert_eq!(number, 3);
        prop_assert_eq!(read_flow(content), Ok((numbers[0], numbers[1], numbers[2], body)));
    }

    #[test]
    fn a_plan_knows_mail_by_its_protocol(seq in any::<u64>(), content in content()) {
        let wanted = match &content {
            Content::Cast { to, .. } | Content::Call { to, .. } => to.protocol.clone(),
            Content::Answer { .. } => "answer".into(),
            Content::Undelivered { .. } => "undelivered".into(),
        };
        let content = content_of(&Frame::Mail(Mail { seq, content }));
        prop_assert_eq!(message_of(&content), wanted);
    }
}

#[test]
fn another_version_is_named_before_anything_else_is_read() {
    let error = open(Bytes::from_static(&[7, 0, 255])).unwrap_err();
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
    let mut bytes = content_of(&Frame::Hello(hello)).to_vec();
    assert!(ENVELOPE + bytes.len() <= MAX_SMALL_FRAME);
    bytes[17] = b'X';
    assert_eq!(decode(Bytes::from(bytes)), Err(FrameError::Magic));
}

/// Prints what a checksum costs; run with `--release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_checksum() {
    let body = vec![0x5au8; 64 << 10];
    let mut head = flow_head(1, 2, 3);
    let rounds = 20_000u32;
    let began = std::time::Instant::now();
    for number in 0..rounds {
        seal(&mut head, std::hint::black_box(&body), number.into());
    }
    println!("sealing a frame of 64 KiB: {:?}", began.elapsed() / rounds);
}

#[test]
fn long_texts_are_cut_at_a_character() {
    let detail = "é".repeat(400);
    let outcome = Outcome { code: Code::Decode, detail };
    let content = Content::Answer { id: 1, outcome, body: Bytes::new() };
    let bytes = content_of(&Frame::Mail(Mail { seq: 0, content }));
    assert!(bytes.len() <= MAX_MAIL_HEAD);
    let Ok((_, Frame::Mail(Mail { content: Content::Answer { outcome, .. }, .. }))) = decode(bytes)
    else {
        panic!("not an answer")
    };
    assert_eq!(outcome.detail, "é".repeat(256));
}
