//! `dunlin chat`: a conversation of many turns.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Result;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::cluster::Cluster;
use crate::config::ConfigArgs;
use crate::signals::{INTERRUPTED, Signals};
use crate::talk::{self, AnswerArgs};

/// Talk with the model, turn by turn: start the cluster if it is not up, stop it at the end.
///
/// Ctrl-C ends an answer; at the prompt it ends the conversation, as Ctrl-D does.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
In the conversation:
  /new          forget what was said
  /again        answer the last question once more
  /quit         leave

Examples:
  dunlin chat
  dunlin chat --system \"You are a pirate\" --temperature 0.8")]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    answer: AnswerArgs,
}

pub async fn run(args: Args) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    let model = args.config.load()?.cluster.model;
    let Some(cluster) = signals.or(Cluster::open(&args.config)).await else {
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let cluster = cluster?;
    let shown = std::io::stdin().is_terminal();
    if shown {
        eprintln!("{model} at {} (/quit or Ctrl-D to leave)", cluster.url);
    }
    let mut lines = read_lines();
    let mut turns = Turns::new(args.answer.system.clone());
    loop {
        if shown {
            eprint!("> ");
            let _ = std::io::stderr().flush();
        }
        let Some(Some(line)) = signals.or(lines.recv()).await else { break };
        match turns.take(&line) {
            Step::Nothing => continue,
            Step::Say(text) => eprintln!("{text}"),
            Step::Leave => break,
            Step::Ask => {
                let asked = talk::answer(&cluster.client, &model, &turns.messages, &args.answer);
                let answered = signals.or(asked).await;
                println!();
                match answered {
                    Some(Ok(answer)) => {
                        eprintln!("{}", answer.summary());
                        turns.answered(&answer.text);
                    }
                    Some(Err(e)) => {
                        eprintln!("error: {e}");
                        turns.unanswered();
                    }
                    None => {
                        eprintln!("(cancelled)");
                        turns.unanswered();
                    }
                }
            }
        }
    }
    if shown {
        eprintln!();
    }
    cluster.close(&mut signals).await?;
    Ok(ExitCode::SUCCESS)
}

/// Standard input blocks, so it is read on a thread of its own; it ends with the process.
fn read_lines() -> UnboundedReceiver<String> {
    let (lines, received) = unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if lines.send(line).is_err() {
                break;
            }
        }
    });
    received
}

/// The conversation so far.
struct Turns {
    system: Option<String>,
    messages: Vec<Value>,
}

#[derive(Debug, PartialEq)]
enum Step {
    Nothing,
    Say(&'static str),
    /// The messages end with a question.
    Ask,
    Leave,
}

impl Turns {
    fn new(system: Option<String>) -> Turns {
        let mut turns = Turns { system, messages: Vec::new() };
        turns.forget();
        turns
    }

    fn take(&mut self, line: &str) -> Step {
        match line.trim() {
            "" => Step::Nothing,
            "/quit" | "/exit" => Step::Leave,
            "/new" => {
                self.forget();
                Step::Say("(a new conversation)")
            }
            "/again" => {
                if self.last_role() == Some("assistant") {
                    self.messages.pop();
                }
                match self.last_role() {
                    Some("user") => Step::Ask,
                    _ => Step::Say("(nothing was asked yet)"),
                }
            }
            other if other.starts_with('/') => Step::Say("(commands: /new, /again, /quit)"),
            text => {
                self.messages.push(json!({"role": "user", "content": text}));
                Step::Ask
            }
        }
    }

    fn answered(&mut self, text: &str) {
        self.messages.push(json!({"role": "assistant", "content": text}));
    }

    /// A question without an answer is not part of the conversation.
    fn unanswered(&mut self) {
        self.messages.pop();
    }

    fn forget(&mut self) {
        let system = self.system.iter();
        self.messages = system.map(|text| json!({"role": "system", "content": text})).collect();
    }

    fn last_role(&self) -> Option<&str> {
        self.messages.last().and_then(|message| message["role"].as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_alternate_and_can_be_taken_back() {
        let mut turns = Turns::new(Some("be brief".into()));
        assert_eq!(turns.take("/again"), Step::Say("(nothing was asked yet)"));
        assert_eq!(turns.take(" hello "), Step::Ask);
        turns.answered("hi");
        assert_eq!(turns.take("/again"), Step::Ask);
        assert_eq!(turns.messages.len(), 2);
        turns.answered("hi there");
        assert_eq!(turns.take("more"), Step::Ask);
        turns.unanswered();
        assert_eq!(turns.last_role(), Some("assistant"));
        turns.take("/new");
        assert_eq!(turns.messages, [json!({"role": "system", "content": "be brief"})]);
        assert_eq!(turns.take("/what"), Step::Say("(commands: /new, /again, /quit)"));
        assert_eq!(turns.take("/quit"), Step::Leave);
    }
}
