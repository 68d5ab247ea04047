//! Where in the files a token stands that the model has no row for. Read only once something is wrong.

use crate::source::{Format, HEADER, Sink, Source, read};
use crate::{DataError, Tokenizer};

/// The first token of the sources that is not below `vocabulary`, as the error that names its file and offset; `Ok` when
/// there is none.
///
/// # Errors
/// [`DataError::Vocabulary`], or whatever reading the sources meets before.
pub(crate) fn first_outside(sources: &[Source], tokenizer: &Tokenizer, vocabulary: usize) -> Result<(), DataError> {
    sources.iter().try_for_each(|source| {
        let mut finder =
            Finder { source, tokenizer, vocabulary, pieces: 0, of_document: 0, of_file: 0, called: false, inserted: 0 };
        read(source, tokenizer, &mut finder)
    })
}

/// A sink that keeps nothing and fails at the first token outside.
struct Finder<'a> {
    source: &'a Source,
    tokenizer: &'a Tokenizer,
    vocabulary: usize,
    /// Calls of [`Sink::read`]: JSON Lines are reported line by line, each before its tokens.
    pieces: u64,
    /// Tokens of the document so far, without the one before it.
    of_document: u64,
    /// Tokens of the file so far, with those before documents.
    of_file: u64,
    /// A call has been made.
    called: bool,
    /// Tokens that are not in the file: 1 when a shard begins in the middle of a document.
    inserted: u64,
}

impl Finder<'_> {
    fn refuse(&self, token: u32) -> DataError {
        let path = self.source.path.display();
        let place = match self.source.format {
            Format::JsonLines => format!("{path}:{}", self.pieces),
            Format::Text => match self.byte_in_text() {
                Some(byte) => format!("{path}, byte {byte}"),
                None => format!("{path}, token {}", self.of_document),
            },
            Format::Tokens => {
                let at = self.of_file.saturating_sub(self.inserted);
                format!("{path}, byte {} (token {at})", HEADER as u64 + 2 * at)
            }
        };
        let by = self.tokenizer.path().map_or_else(String::new, |p| format!(" (tokenizer {})", p.display()));
        DataError::Vocabulary { place: place + &by, token, vocabulary: self.vocabulary }
    }

    /// Where in a text file the document's next token begins.
    fn byte_in_text(&self) -> Option<u64> {
        if self.tokenizer.takes_bytes() || self.of_document == 0 {
            return Some(self.of_document);
        }
        let text = std::fs::read_to_string(&self.source.path).ok()?;
        self.tokenizer.offset_of(&text, self.of_document as usize).map(|byte| byte as u64)
    }

    fn check(&self, token: u32) -> Result<(), DataError> {
        if token as usize >= self.vocabulary { Err(self.refuse(token)) } else { Ok(()) }
    }
}

impl Sink for Finder<'_> {
    fn begin(&mut self, end_of_text: u32) -> Result<(), DataError> {
        // A shard's own first document begins behind the (empty) rest of the one before.
        self.inserted = self.inserted.max(u64::from(!self.called && self.source.format == Format::Tokens));
        self.called = true;
        self.of_document = 0;
        self.check(end_of_text)?;
        self.of_file += 1;
        Ok(())
    }

    fn tokens(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        self.called = true;
        for token in tokens {
            self.check(*token)?;
            self.of_document += 1;
            self.of_file += 1;
        }
        Ok(())
    }

    fn read(&mut self, _bytes: u64) {
        self.pieces += 1;
    }
}
