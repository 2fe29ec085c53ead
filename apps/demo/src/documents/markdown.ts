export interface Link {
  target: string;
  line: number;
}

export interface MarkdownFacts {
  title: string | null;
  headings: number;
  /** Fenced code blocks by language; 'none' where the fence names none. */
  codeLanguages: Record<string, number>;
  links: Link[];
}

/** Of a line without end only the start is looked at. Every pattern below is linear in it. */
const MAX_LINE = 20_000;

const FENCE = /^[\s>]*(`{3,}|~{3,})[ \t]*([\w+#.-]{0,40})/;
const HEADING = /^ {0,3}#{1,6}(?:[ \t]+|$)/;
const UNDERLINE = /^ {0,3}(?:={2,}|-{3,})[ \t]*$/;
const CODE = /`[^`]*`/g;
const INLINE_LINK = /\]\([ \t]*(?:<([^<>]{1,2000})>|((?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,2000}))/g;
const DEFINITION = /^ {0,3}\[(?!\^)[^\]]{1,500}\]:[ \t]*<?([^\s<>]{1,2000})/;
const HTML_LINK = /\b(?:href|src)=["']([^"'\s]{1,2000})["']/gi;

/** Reads what the index wants to know of a Markdown text, line by line; links and headings inside code blocks are none. */
export function readMarkdown(text: string): MarkdownFacts {
  const facts: MarkdownFacts = { title: null, headings: 0, codeLanguages: {}, links: [] };
  let fence: string | undefined;
  let previous = '';
  let number = 0;
  for (const whole of text.split(/\r\n|\n|\r/)) {
    number++;
    const line = whole.slice(0, MAX_LINE);
    const [, mark, language] = FENCE.exec(line) ?? [];
    if (fence !== undefined) {
      if (mark?.startsWith(fence)) fence = undefined;
    } else if (mark !== undefined) {
      fence = mark;
      const name = language?.toLowerCase() || 'none';
      facts.codeLanguages[name] = (facts.codeLanguages[name] ?? 0) + 1;
    } else {
      readHeading(line, previous, facts);
      for (const target of targetsOf(line)) facts.links.push({ target, line: number });
    }
    previous = fence === undefined ? line : '';
  }
  return facts;
}

function readHeading(line: string, previous: string, facts: MarkdownFacts): void {
  const atx = HEADING.test(line);
  const underlined = UNDERLINE.test(line) && /^ {0,3}[^\s|>*+-]/.test(previous) && !HEADING.test(previous);
  if (!atx && !underlined) return;
  facts.headings++;
  facts.title ??=
    (atx ? line.replace(HEADING, '') : previous)
      .replace(/[#\s]+$/, '')
      .trim()
      .slice(0, 200) || null;
}

function* targetsOf(line: string): Generator<string> {
  const definition = DEFINITION.exec(line)?.[1];
  if (definition !== undefined) yield definition;
  if (!line.includes('](') && !line.includes('=')) return;
  const prose = line.replace(CODE, '');
  for (const [, bracketed, bare] of prose.matchAll(INLINE_LINK)) yield bracketed ?? bare ?? '';
  for (const [, target] of prose.matchAll(HTML_LINK)) yield target ?? '';
}
