//! One HTTP request's dealings with the router: a router request for each answer, their events
//! merged into one sequence of updates with exactly one end.

use super::answer::{Answer, Entry, Piece, Rules};
use super::error::ApiError;
use super::limits::Limits;
use super::prepare::{Prompt, choice_seed, prompt_param};
use super::registry::{Delivery, Guard, Registry};
use super::request::{Asked, Endpoint};
use super::text::TextModel;
use super::wire::Totals;
use crate::messages::{
    FinishReason, Refusal, Request, RequestId, RouterCall, RouterProtocol, RouterReply,
    StreamEvent, Usage,
};
use dunlin_model::sampling::TokenLogprob;
use dunlin_runtime::Address;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

/// What it takes to open an exchange.
pub struct Opening<'a> {
    pub registry: &'a Arc<Registry>,
    pub model: &'a Arc<dyn TextModel>,
    pub limits: &'a Limits,
    pub reply_to: Address,
    pub tenant: &'a str,
    pub endpoint: Endpoint,
    /// When the HTTP request's head had been read.
    pub began: std::time::Instant,
}

/// What happened next to one of the answers.
#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    Piece { choice: usize, piece: Piece },
    Finished { choice: usize, reason: FinishReason },
}

/// Dropping it cancels whatever has not ended.
pub struct Exchange {
    events: mpsc::UnboundedReceiver<Delivery>,
    choices: Vec<Choice>,
    queue: VecDeque<Update>,
    /// Answers that have not ended yet.
    open: usize,
    deadline: Instant,
    settle: Duration,
    prompt_tokens: u64,
    /// Answers of each prompt.
    n: usize,
}

struct Choice {
    guard: Guard,
    answer: Answer,
    /// Prompt ids and log probabilities so far, where they are to be shown first.
    echo: Option<Echo>,
    /// The client was told that this answer is over.
    ended: bool,
    stopped: bool,
    scoring: bool,
    terminal: Option<(Usage, Vec<String>)>,
}

struct Echo {
    text: String,
    /// Each prompt token with the character its text begins at.
    tokens: Vec<(u32, usize)>,
    logprobs: Vec<TokenLogprob>,
}

impl Opening<'_> {
    /// Submits one router request per answer; all are accepted, or none is left running.
    pub async fn open(&self, asked: &Asked, prompts: &[Prompt]) -> Result<Exchange, ApiError> {
        let (sender, events) = mpsc::unbounded_channel();
        let n = usize::try_from(asked.n).unwrap_or(usize::MAX);
        let seed = match asked.seed {
            Some(seed) => seed,
            None => random_u64()?,
        };
        let mut exchange = Exchange {
            events,
            choices: Vec::with_capacity(prompts.len().saturating_mul(n)),
            queue: VecDeque::new(),
            open: 0,
            // The router ends a request at its deadline; this is for when the router is gone.
            deadline: Instant::now() + self.limits.deadline + Duration::from_secs(2),
            settle: self.limits.settle,
            prompt_tokens: prompts.iter().map(|p| p.ids.len() as u64).sum(),
            n,
        };
        for prompt in prompts {
            for index in 0..asked.n {
                let seed = choice_seed(seed, index);
                let choice = exchange.choices.len();
                let opened = self.submit(asked, prompt, seed, choice, &sender).await?;
                exchange.choices.push(opened);
                exchange.open += 1;
            }
        }
        for choice in 0..exchange.choices.len() {
            exchange.show_echo(choice);
        }
        Ok(exchange)
    }

    async fn submit(
        &self,
        asked: &Asked,
        prompt: &Prompt,
        seed: u64,
        choice: usize,
        events: &mpsc::UnboundedSender<Delivery>,
    ) -> Result<Choice, ApiError> {
        let mut request = self.request(asked, prompt, seed)?;
        loop {
            let room = request.max_tokens;
            let mut guard =
                self.registry.register(request.id, choice, room, self.began, events.clone());
            let Err(refusal) = self.call(&request).await? else {
                let answer = self.answer(asked, prompt, &request);
                return Ok(Choice {
                    guard,
                    answer,
                    echo: self.echo(asked, prompt),
                    ended: false,
                    stopped: false,
                    scoring: prompt.max_tokens == 0,
                    terminal: None,
                });
            };
            guard.over();
            match smaller(&refusal, &request, asked) {
                // A default is ours to choose: as much as fits.
                Some(max_tokens) => request.max_tokens = max_tokens,
                None => return Err(self.refused(&refusal, asked)),
            }
            request.id = RequestId(random_u64()?);
        }
    }

    /// Asks the router. Dropped or failed in mid-call, the guard cancels what may have begun.
    async fn call(&self, request: &Request) -> Result<Result<(), Refusal>, ApiError> {
        let call = RouterCall::Submit(Box::new(request.clone()));
        let (router, wait) = (&self.registry.router, self.limits.submit);
        let unavailable = |why: String| {
            let message = format!("the router at {router} did not take the request: {why}");
            ApiError::unavailable("router_unavailable", message, Duration::from_secs(1))
        };
        match self.registry.node.call::<RouterProtocol>(router, &call, wait).await {
            Ok(RouterReply::Submitted(outcome)) => Ok(outcome),
            Ok(_) => Err(unavailable("it answered another question".into())),
            Err(error) => Err(unavailable(error.to_string())),
        }
    }

    fn refused(&self, refusal: &Refusal, asked: &Asked) -> ApiError {
        let param = match asked.max_tokens {
            Some(_) => "max_tokens",
            None => prompt_param(self.endpoint),
        };
        ApiError::refused(refusal, param)
    }

    fn request(&self, asked: &Asked, prompt: &Prompt, seed: u64) -> Result<Request, ApiError> {
        let mut sampling = asked.sampling.clone();
        sampling.seed = seed;
        Ok(Request {
            id: RequestId(random_u64()?),
            tenant: self.tenant.to_owned(),
            cache_salt: asked.cache_salt.clone(),
            prompt: prompt.ids.clone(),
            keys: Some(prompt.keys.clone()),
            prompt_logprobs: asked.sampling.logprobs.filter(|_| asked.echo),
            sampling,
            max_tokens: prompt.max_tokens.max(1),
            min_tokens: asked.min_tokens,
            stop_tokens: self.stop_tokens(asked),
            deadline_ms: u64::try_from(self.limits.deadline.as_millis()).unwrap_or(u64::MAX),
            reply_to: self.reply_to.clone(),
        })
    }

    fn stop_tokens(&self, asked: &Asked) -> Vec<u32> {
        if asked.ignore_eos { Vec::new() } else { self.model.stop_tokens().to_vec() }
    }

    fn answer(&self, asked: &Asked, prompt: &Prompt, request: &Request) -> Answer {
        let rules = Rules {
            stop: asked.stop.clone(),
            stop_tokens: request.stop_tokens.clone(),
            min_tokens: asked.min_tokens,
            logprobs: asked.sampling.logprobs.is_some(),
            max_tokens: prompt.max_tokens.min(request.max_tokens),
        };
        Answer::new(self.model.clone().detokenizer(), rules)
    }

    /// The prompt's text, and where each of its tokens begins in it.
    fn echo(&self, asked: &Asked, prompt: &Prompt) -> Option<Echo> {
        if !asked.echo {
            return None;
        }
        let mut detokenizer = self.model.clone().detokenizer();
        let (mut text, mut chars) = (String::new(), 0);
        let mut tokens = Vec::with_capacity(prompt.ids.len());
        for id in &prompt.ids {
            tokens.push((*id, chars));
            let piece = detokenizer.push(*id);
            chars += piece.chars().count();
            text.push_str(&piece);
        }
        text.push_str(&detokenizer.finish());
        if asked.sampling.logprobs.is_none() {
            tokens.clear();
        }
        let text = prompt.text.clone().unwrap_or(text);
        Some(Echo { text, tokens, logprobs: Vec::new() })
    }
}

impl Exchange {
    /// How many answers it has: prompts times `n`.
    pub fn answers(&self) -> usize {
        self.choices.len()
    }

    /// The router's name for the first answer, which names the whole response.
    pub fn first_id(&self) -> u64 {
        self.choices.first().map_or(0, |choice| choice.guard.id.0)
    }

    /// The next update; `None` once every answer has ended. Nothing is lost if it is dropped
    /// while waiting.
    pub async fn next(&mut self) -> Option<Result<Update, ApiError>> {
        loop {
            if let Some(update) = self.queue.pop_front() {
                return Some(Ok(update));
            }
            if self.open == 0 {
                return None;
            }
            // What has arrived is delivered however late the reader comes for it.
            let (choice, event) = match timeout_at(self.deadline, self.events.recv()).await {
                Ok(Some(delivery)) => delivery,
                Ok(None) => return Some(Err(ApiError::internal("the request lost its events"))),
                Err(_) => {
                    let message = "the request's deadline passed and the router did not answer";
                    return Some(Err(ApiError::timed_out(message)));
                }
            };
            if let Err(error) = self.take(choice, event) {
                return Some(Err(error));
            }
        }
    }

    /// The next update if there is one already.
    pub fn ready(&mut self) -> Option<Result<Update, ApiError>> {
        while self.queue.is_empty() && self.open > 0 {
            let (choice, event) = self.events.try_recv().ok()?;
            if let Err(error) = self.take(choice, event) {
                return Some(Err(error));
            }
        }
        self.queue.pop_front().map(Ok)
    }

    /// Waits a little for the counts of answers that a stop string ended, then adds up.
    pub async fn settle(&mut self) -> Totals {
        let end = Instant::now() + self.settle;
        while self.choices.iter().any(|c| c.terminal.is_none()) {
            match timeout_at(end, self.events.recv()).await {
                // Whatever comes after an answer's end is about its counts only.
                Ok(Some((choice, event))) => drop(self.take(choice, event)),
                _ => break,
            }
        }
        self.totals()
    }

    fn take(&mut self, at: usize, event: StreamEvent) -> Result<(), ApiError> {
        let Some(choice) = self.choices.get_mut(at) else { return Ok(()) };
        if event.is_terminal() {
            choice.guard.over();
        }
        match event {
            StreamEvent::PromptLogprobs(logprobs) => {
                if let Some(echo) = &mut choice.echo {
                    echo.logprobs.extend(logprobs);
                }
                self.show_echo(at);
            }
            StreamEvent::Tokens { .. } | StreamEvent::Finished { .. } if choice.echo.is_some() => {
                return Err(ApiError::internal("the prompt's log probabilities are missing"));
            }
            StreamEvent::Tokens { position, ids, logprobs } if !choice.ended => {
                let piece = choice
                    .answer
                    .tokens(position, &ids, logprobs)
                    .map_err(|gap| ApiError::internal(gap.to_string()))?;
                self.piece(at, piece);
            }
            StreamEvent::Tokens { .. } => {}
            StreamEvent::Finished { reason, usage, served_by } => {
                choice.terminal = Some((usage, served_by));
                if choice.ended {
                    return Ok(());
                }
                let piece = choice.answer.finish();
                let reason = if piece.stopped { FinishReason::Stop } else { reason };
                self.piece(at, Piece { stopped: false, ..piece });
                self.finished(at, reason);
            }
            StreamEvent::Failed { code, message, usage } => {
                choice.terminal = Some((usage, Vec::new()));
                if !choice.ended {
                    return Err(ApiError::failed(code, &message));
                }
            }
            StreamEvent::Cancelled { usage } => {
                choice.terminal = Some((usage, Vec::new()));
                if !choice.ended {
                    return Err(ApiError::internal("the request was cancelled by the cluster"));
                }
            }
        }
        Ok(())
    }

    fn piece(&mut self, at: usize, piece: Piece) {
        let stopped = piece.stopped;
        if !piece.is_empty() {
            self.queue.push_back(Update::Piece { choice: at, piece });
        }
        if stopped {
            if let Some(choice) = self.choices.get_mut(at) {
                choice.stopped = true;
                choice.guard.stop();
            }
            self.finished(at, FinishReason::Stop);
        }
    }

    fn finished(&mut self, at: usize, reason: FinishReason) {
        if let Some(choice) = self.choices.get_mut(at) {
            choice.ended = true;
            self.open = self.open.saturating_sub(1);
            self.queue.push_back(Update::Finished { choice: at, reason });
        }
    }

    /// Shows the prompt once all that is to be shown with it is there.
    fn show_echo(&mut self, at: usize) {
        let Some(choice) = self.choices.get_mut(at) else { return };
        let ready = choice.echo.take_if(|echo| echo.logprobs.len() + 1 >= echo.tokens.len());
        let Some(echo) = ready else { return };
        // Nothing predicts the first token.
        let logprobs = std::iter::once(None).chain(echo.logprobs.into_iter().map(Some));
        let entries = echo.tokens.iter().zip(logprobs);
        let entries =
            entries.map(|((id, offset), logprob)| Entry { id: *id, logprob, offset: *offset });
        let piece = choice.answer.echo(&echo.text, entries.collect());
        self.queue.push_back(Update::Piece { choice: at, piece });
    }

    fn totals(&self) -> Totals {
        let mut totals = Totals { prompt_tokens: self.prompt_tokens, ..Totals::default() };
        for answers in self.choices.chunks(self.n.max(1)) {
            // A prompt is counted once. Its answers find each other's blocks in the cache; what
            // was there before is the least that any of them found.
            let cached = answers.iter().flat_map(|c| &c.terminal).map(|(u, _)| u.cached_tokens);
            totals.cached_tokens += u64::from(cached.min().unwrap_or(0));
            totals.completion_tokens += answers.iter().map(Choice::completion_tokens).sum::<u64>();
            for (_, nodes) in answers.iter().flat_map(|c| &c.terminal) {
                totals.served_by.extend(nodes.iter().cloned());
            }
        }
        totals.served_by.sort();
        totals.served_by.dedup();
        totals
    }
}

impl Choice {
    /// What the cluster counted; for a stop string, what it took to complete it, so that the
    /// count does not depend on how fast the cancel was.
    fn completion_tokens(&self) -> u64 {
        match &self.terminal {
            _ if self.scoring => 0,
            Some((usage, _)) if !self.stopped => u64::from(usage.completion_tokens),
            _ => u64::from(self.answer.taken()),
        }
    }
}

/// The most output that fits, where the client left it to us and the largest replica is smaller
/// than the model's context.
fn smaller(refusal: &Refusal, request: &Request, asked: &Asked) -> Option<u32> {
    let Refusal::NeverFits { have, .. } = refusal else { return None };
    if asked.max_tokens.is_some() {
        return None;
    }
    let room = have.checked_sub(request.prompt.len() as u64)?;
    u32::try_from(room).ok().filter(|room| *room >= 1 && *room < request.max_tokens)
}

fn random_u64() -> Result<u64, ApiError> {
    getrandom::u64()
        .map_err(|error| ApiError::internal(format!("no randomness from the system: {error}")))
}
