use super::*;
use crate::frame::flow_head;
use crate::transport::BoxFuture;
use proptest::prelude::*;

/// Gives what it was made with, then ends cleanly.
struct Given(VecDeque<Bytes>);

impl FrameSource for Given {
    fn recv(&mut self, _: usize) -> BoxFuture<'_, Result<Option<Bytes>, LinkError>> {
        let next = self.0.pop_front();
        Box::pin(async move { Ok(next) })
    }
}

fn sealed(number: u64) -> Bytes {
    let body = Bytes::from(vec![number as u8; (number as usize * 7) % 40]);
    let frame = Draft { head: flow_head(1, number, !number), body }.seal(number);
    Bytes::from([&frame.head[..], &frame.body[..]].concat())
}

/// What happens to a frame between the two ends.
#[derive(Debug, Clone)]
enum Harm {
    None,
    Corrupt(prop::sample::Index, u8),
    Truncate(prop::sample::Index),
    Repeat(prop::sample::Index),
    Lose,
}

fn harm() -> impl Strategy<Value = Harm> {
    prop_oneof![
        12 => Just(Harm::None),
        1 => (any::<prop::sample::Index>(), 1u8..).prop_map(|(at, mask)| Harm::Corrupt(at, mask)),
        1 => any::<prop::sample::Index>().prop_map(Harm::Truncate),
        3 => any::<prop::sample::Index>().prop_map(Harm::Repeat),
        1 => Just(Harm::Lose),
    ]
}

/// What a receiver makes of the frames: the steps it was given, how it ended, what it refused.
fn receive(frames: Vec<Bytes>) -> (Vec<u64>, Option<FrameError>, u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let guard = Guard::new(NodeName::new("a").unwrap(), Faults::none());
    let mut lane = LaneIn::new(Box::new(Given(frames.into())), &guard, "b");
    let mut steps = Vec::new();
    let end = loop {
        match runtime.block_on(lane.recv(1000)) {
            Ok(Some(content)) => {
                let (epoch, step, tag, body) = frame::read_flow(content).unwrap();
                assert_eq!((epoch, tag, body.len() as u64), (1, !step, (step * 7) % 40));
                steps.push(step);
            }
            Ok(None) => break None,
            Err(LaneError::Frame(error)) => break Some(error),
            Err(LaneError::Link(error)) => panic!("{error}"),
        }
    };
    (steps, end, guard.refused.load(Ordering::Relaxed))
}

proptest! {
    /// Whatever happens to frames: what is received is what was sent, from its beginning, each
    /// once. It ends early only at the first frame that is damaged or missing.
    #[test]
    fn a_lane_gives_a_true_prefix(harms in prop::collection::vec(harm(), 0..40)) {
        let (mut wire, mut repeats, mut good) = (Vec::new(), 0, None);
        for (number, harm) in harms.iter().enumerate() {
            let whole = sealed(number as u64);
            match harm {
                Harm::None => wire.push(whole),
                Harm::Corrupt(at, mask) => {
                    let mut bytes = whole.to_vec();
                    let at = at.index(bytes.len());
                    bytes[at] ^= mask;
                    wire.push(Bytes::from(bytes));
                }
                Harm::Truncate(keep) => wire.push(whole.slice(..keep.index(whole.len()))),
                Harm::Repeat(which) => {
                    wire.push(whole);
                    wire.push(sealed(which.index(number + 1) as u64));
                    repeats += u64::from(good.is_none());
                }
                Harm::Lose => {}
            }
            let harmless = matches!(harm, Harm::None | Harm::Repeat(_));
            good = good.or((!harmless).then_some(number as u64));
        }
        let (steps, end, refused) = receive(wire);
        let whole = good.unwrap_or(harms.len() as u64);
        prop_assert_eq!(steps, (0..whole).collect::<Vec<_>>());
        prop_assert_eq!(refused, repeats);
        // Frames lost at the very end leave no trace; the link's end tells of them.
        let tail = harms.iter().skip(whole as usize).all(|harm| matches!(harm, Harm::Lose));
        prop_assert_eq!(end.is_none(), good.is_none() || tail, "{:?}", end);
    }
}

#[test]
fn a_stale_frame_is_refused_and_the_lane_goes_on() {
    let (steps, end, refused) =
        receive(vec![sealed(0), sealed(1), sealed(0), sealed(1), sealed(2)]);
    assert_eq!((steps, end, refused), (vec![0, 1, 2], None, 2));
}

#[test]
fn a_missing_frame_is_named() {
    let (steps, end, _) = receive(vec![sealed(0), sealed(2)]);
    assert_eq!(steps, [0]);
    assert_eq!(end, Some(FrameError::Gap { number: 2, expected: 1 }));
}
