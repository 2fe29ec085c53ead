import type { Check, Summary } from '../run/verify';
import type { Findings } from './findings';
import { digits, printable } from './format';

const MAX_ROWS = 30;

/** The report for human eyes. */
export function reportText(folder: string, summary: Summary, checks: Check[], findings: Findings): string {
  const { totals } = findings;
  const unlisted = findings.brokenLinks.length - MAX_ROWS;
  return [
    `Leasehold demo: index of ${printable(folder)}`,
    section('Delivery', [
      ...checks.map(({ ok, text }) => [ok ? 'ok' : 'NOT OK', text]),
      [
        '',
        `runs closed by rescue: ${summary.rescued.session} session lost, ${summary.rescued.lease} lease expired, ${summary.rescued.deadline} deadline`,
      ],
      ['', `late results refused: ${summary.refusedWrites}`],
      ...(summary.recoveryMs === null
        ? []
        : [['', `from the kill until its last job was claimed again: ${digits(summary.recoveryMs)} ms`]]),
    ]),
    section('Totals', [
      [summary.files, 'files'],
      [summary.completed, 'indexed'],
      [summary.failed, 'not readable as text'],
      ...(totals.truncated > 0 ? [[totals.truncated, 'larger than 8 MiB: only their beginning was read']] : []),
      [totals.bytes, 'bytes'],
      [totals.lines, 'lines'],
      [totals.words, 'words'],
      [totals.headings, 'headings'],
      [totals.links, 'links'],
      [totals.brokenLinks, 'relative links that lead to nothing'],
    ]),
    section('Files by worker', flip(findings.workers)),
    section(
      'Largest files, bytes',
      findings.largest.map(({ path, bytes }) => [bytes, path]),
    ),
    section(
      'Most words',
      findings.mostWords.map(({ path, words }) => [words, path]),
    ),
    section('Languages of code blocks', flip(findings.codeLanguages).slice(0, MAX_ROWS)),
    section('Letters by script', flip(findings.scripts)),
    section('Encodings', flip(findings.encodings)),
    section(
      'Same content, copies',
      findings.duplicates.map(({ copies, path }) => [copies, path]),
    ),
    section(
      'Not readable as text',
      findings.failures.slice(0, MAX_ROWS).map(({ path, reason }) => ['', `${path}  ${reason}`]),
    ),
    section(
      'Broken relative links',
      findings.brokenLinks.slice(0, MAX_ROWS).map(({ path, line, target }) => ['', `${path}:${line}  ${target}`]),
    ) + (unlisted > 0 ? `\n  … and ${digits(unlisted)} more in leasehold-report.json` : ''),
  ]
    .filter((part) => part !== '')
    .join('\n\n')
    .concat('\n');
}

/** A heading and rows of two columns: a number or a word, flush right, and a text. */
function section(title: string, rows: (string | number)[][]): string {
  if (rows.length === 0) return '';
  const cells = rows.map(([left = '', right = '']) => [
    typeof left === 'number' ? digits(left) : left,
    printable(String(right)),
  ]);
  const width = Math.max(...cells.map(([left = '']) => left.length));
  return [
    title,
    ...cells.map(([left = '', right = '']) => `  ${left.padStart(width)}${width > 0 ? '  ' : ''}${right}`),
  ].join('\n');
}

const flip = (counts: Record<string, number>): (string | number)[][] =>
  Object.entries(counts).map(([key, count]) => [count, key]);
