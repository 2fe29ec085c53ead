import { join } from 'node:path';
import { type LinkFacts, checkLinks } from './links';
import { type MarkdownFacts, readMarkdown } from './markdown';
import { type DocumentText, readDocument } from './read-document';
import { countScripts, countWords } from './scripts';
import { isMarkdown } from './walk';

/** What the index knows of one document: the result of its job. */
export interface DocumentIndex
  extends Omit<DocumentText, 'text'>, Pick<MarkdownFacts, 'title' | 'headings' | 'codeLanguages'> {
  lines: number;
  words: number;
  scripts: Record<string, number>;
  links: LinkFacts;
}

/** Reads and measures one file. @throws NonRetryableError when it is no text */
export async function indexDocument(root: string, path: string): Promise<DocumentIndex> {
  const file = join(root, path);
  const { text, ...read } = await readDocument(file);
  const { links, ...markdown }: MarkdownFacts = isMarkdown(path)
    ? readMarkdown(text)
    : { title: null, headings: 0, codeLanguages: {}, links: [] };
  return {
    ...read,
    ...markdown,
    lines: text === '' ? 0 : text.split('\n').length,
    words: countWords(text),
    scripts: countScripts(text),
    links: await checkLinks(file, links),
  };
}
